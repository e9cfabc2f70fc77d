"""The lab's sub-commands of `headway`."""

from __future__ import annotations

from headway.console.commands import Command, CommandGroup, Commands

COMMANDS: Commands = {
    "bench": CommandGroup(
        "Measure speed, beside the least time that the machine allows.",
        {
            "latency": Command(
                "headway_lab.bench.bench_latency_command", "One batch of equal requests, again and again."
            ),
            "throughput": Command(
                "headway_lab.bench.bench_throughput_command", "Many requests, all at once or as in a trace."
            ),
            "serve": Command("headway_lab.bench.bench_serve_command", "Put a load on any server with OpenAI's API."),
            "sweep": Command(
                "headway_lab.bench.bench_sweep_command", "The same work at several rates, or with several settings."
            ),
            "capacity": Command(
                "headway_lab.bench.bench_capacity_command", "The highest rate that meets objectives for latency."
            ),
            "compare": Command("headway_lab.bench.bench_compare_command", "Results beside each other."),
        },
    ),
    "workload": Command(
        "headway_lab.workload.workload_command", "Show what a workload file describes, as numbers and as plots."
    ),
    "calibrate": Command(
        "headway_lab.sim.calibrate_command", "Measure what steps cost on this machine, for sim and tune."
    ),
    "sim": Command(
        "headway_lab.sim.sim_command", "Simulate a workload on a calibrated machine, or on several, in seconds."
    ),
    "sim-check": Command(
        "headway_lab.sim.sim_check_command", "Run a workload in the engine and in the simulator, and compare."
    ),
    "tune": Command("headway_lab.tune.tune_command", "Find the options that serve a workload best, by simulation."),
    "size": Command(
        "headway_lab.size.size_command",
        "How many devices a model needs for a load, at which price, from its shape alone.",
    ),
    "claims": Command(
        "headway_lab.claims.claims_command", "Measure published claims about serving again, each by its name."
    ),
    "train-predictor": Command(
        "headway_lab.predictor.train_command",
        "Learn from a traffic log to tell long answers from short ones beforehand.",
    ),
}
