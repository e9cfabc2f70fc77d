"""KV blocks between memories: of the device, of the host, of disks, and of other engine processes.

block_store       what an engine sees of all of them       host_blocks     the host's memory, and copies to the device
disk_store        a folder that outlives the process       block_server    hands blocks to other processes
                                                           block_client    fetches blocks from them
                                                           carriers        how the bytes get from one to the other
"""
