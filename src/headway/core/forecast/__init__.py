"""Forecasts of how long a request will wait for its first token and for its end.

forecaster       the forecast of one request, made when it arrives
waiting_totals   sums over the waiting requests
answers          how long answers are, and how fast requests leave the batch
arrivals         how many prompt tokens arrive
"""
