//! Knows sites, hosts, VMs, volumes and wires, and runs moves.
