//! Hypervisor drivers.
