//! Taps, bridges and tunnels, by netlink.
