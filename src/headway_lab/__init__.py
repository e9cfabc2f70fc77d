"""The lab: workloads, benchmarks, the simulator, the tuner and the claims. The engine imports none of it."""
