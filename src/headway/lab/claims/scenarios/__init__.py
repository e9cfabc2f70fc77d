"""One file for each claim: its text, its workload and its measure."""
