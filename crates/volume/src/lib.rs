//! Replicas of virtual disks: stamps, hot regions, and the mirror.
