"""Workloads: which requests come, when, and how long they are. One source for measuring and for simulating."""

from headway_lab.workload.bench_requests import BenchRequest, Work
from headway_lab.workload.catalogue import shipped_workloads
from headway_lab.workload.workload import Workload
from headway_lab.workload.workload_file import load_workload, parse_overrides, workload_from_options
from headway_lab.workload.workload_report import LengthStatistics, WorkloadStatistics, statistics_of

__all__ = [
    "BenchRequest",
    "LengthStatistics",
    "Work",
    "Workload",
    "WorkloadStatistics",
    "load_workload",
    "parse_overrides",
    "shipped_workloads",
    "statistics_of",
    "workload_from_options",
]
