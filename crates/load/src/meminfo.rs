//! /proc/meminfo.

use std::{fs, io};

/// The lines of /proc/meminfo that decide how much memory may be filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// MemTotal, KiB.
    pub total_kib: u64,
    /// MemFree, KiB: memory that holds nothing.
    pub free_kib: u64,
    /// MemAvailable, KiB: what programs can still get, page cache included.
    pub available_kib: u64,
}

impl MemInfo {
    /// Reads it from the kernel.
    ///
    /// # Errors
    /// When /proc is not mounted, or is not Linux's.
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        Self::parse(&text).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo lacks MemTotal, MemFree or MemAvailable")
        })
    }

    /// Understands the text of /proc/meminfo.
    pub fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse().ok()
        };
        Some(Self { total_kib: value("MemTotal")?, free_kib: value("MemFree")?, available_kib: value("MemAvailable")? })
    }

    /// Whether MemFree is at most `percent` of MemTotal.
    pub fn free_is_at_most(&self, percent: u8) -> bool {
        self.free_kib.saturating_mul(100) <= self.total_kib.saturating_mul(percent.into())
    }

    /// MemAvailable that must stay, or the kernel starts to kill: 16 MiB, or a twentieth if that is more.
    pub fn floor_kib(&self) -> u64 {
        (16 * 1024).max(self.total_kib / 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_understood_and_anything_else_is_not() {
        let text =
            "MemTotal:         502380 kB\nMemFree:           75357 kB\nMemAvailable:     300000 kB\nBuffers: 1 kB\n";
        let info = MemInfo::parse(text).unwrap();
        assert_eq!(info, MemInfo { total_kib: 502_380, free_kib: 75_357, available_kib: 300_000 });
        assert!(info.free_is_at_most(15) && !info.free_is_at_most(14));
        assert_eq!(MemInfo::parse("MemTotal: 1 kB\nMemFree: x kB"), None);
        MemInfo::read().unwrap();
    }
}
