//! What both ends are told.

use crate::meter::Clock;
use std::fmt;

/// RAM that is believed when nothing else is said: 4 TiB. The table of hashes takes 1/256 of it, untouched until used.
pub const DEFAULT_MAX_RAM: u64 = 4 << 40;
/// Window of 256 MiB, which both ends have in memory as far as the stream fills it. With twice that recorded streams had 0.1 to 0.3 % fewer bytes, with
/// half of it (what `zstd --long` uses) 1.4 to 4.8 % more.
pub const DEFAULT_WINDOW_LOG: u32 = 28;
/// Window where nothing is looked for over long distances: 1 MiB.
pub const NEAR_WINDOW_LOG: u32 = 20;
/// That of [`Reach::Middle`], where it is smaller than [`Config::window_log`]: 8 MiB leave as good as the same of memory, 1 MiB a twentieth more.
pub const MIDDLE_WINDOW_LOG: u32 = 24;
/// What the source keeps of what it last sent, at most: 256 MiB, or the guest's memory if that is less.
pub const DEFAULT_VERSIONS: u64 = 256 << 20;

/// Key of the hashes by which an encoder knows a page again. They never leave it.
///
/// Random for every stream: then nobody in the guest can prepare two pages that hash alike.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageKey(pub [u8; 32]);

impl PageKey {
    /// From the kernel's generator.
    ///
    /// # Panics
    /// On a machine without one.
    #[must_use]
    pub fn random() -> Self {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("the kernel gives random bytes once it has booted");
        Self(key)
    }
}

/// A key is not for logs.
impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageKey(..)")
    }
}

/// What to do with a page that comes again as it was last sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resends {
    /// Leave it out of the rebuilt stream.
    #[default]
    Elide,
    /// Send it: the rebuilt stream is QEMU's, byte for byte.
    Keep,
}

/// How far back zstd looks for what is alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Over all of the window ([`Config::window_log`]), which takes an encoder 1.5 times as long at level 1, for 5 to 9 % fewer bytes.
    #[default]
    Far,
    /// Without a look for matches over long distances, and so over no more than [`MIDDLE_WINDOW_LOG`] holds: at level 1 a fifth faster, for a twentieth more bytes.
    Middle,
    /// As far as its table of places does by itself: [`NEAR_WINDOW_LOG`] holds all of it, and a processor's cache holds that.
    Near,
}

impl Reach {
    /// Logarithm of the window in bytes, of a stream whose [`Config::window_log`] is this one.
    #[must_use]
    pub fn window_log(self, whole: u32) -> u32 {
        match self {
            Self::Far => whole,
            Self::Middle => whole.min(MIDDLE_WINDOW_LOG),
            Self::Near => whole.min(NEAR_WINDOW_LOG),
        }
    }
}

/// How an [`Encoder`](crate::Encoder) works. The default has a fresh random key.
#[derive(Clone, Debug)]
pub struct Config {
    /// zstd's level, -131072 to 19.
    pub level: i32,
    /// How far back it looks.
    pub reach: Reach,
    /// zstd has a thread of its own beside the caller's, and what it takes is measured by this clock ([`Encoder::beside`](crate::Encoder::beside)). What an
    /// encoder was given comes out of it a piece (some 128 KiB, before zstd) later then, and all of it at a flush; until then it is not among the bytes that were given out.
    pub beside: Option<Clock>,
    /// Logarithm of zstd's window in bytes, 17 to 31. Both ends allocate that much.
    pub window_log: u32,
    /// What to do with unchanged pages.
    pub resends: Resends,
    /// For the hashes of pages.
    pub key: PageKey,
    /// Largest RAM that QEMU may announce, in bytes.
    pub max_ram: u64,
    /// How much is kept of what was last sent, in bytes, to send differences from it; 0: no differences. It is taken as pages go, and a
    /// destination that cannot read its guest's RAM keeps as much.
    pub versions: u64,
    /// To measure with where time goes ([`Stages`](crate::Stages)).
    pub clock: Option<Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            level: 1,
            reach: Reach::default(),
            beside: None,
            window_log: DEFAULT_WINDOW_LOG,
            resends: Resends::default(),
            key: PageKey::random(),
            max_ram: DEFAULT_MAX_RAM,
            versions: DEFAULT_VERSIONS,
            clock: None,
        }
    }
}

/// What a [`Decoder`](crate::Decoder) believes at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// RAM of the guest, in bytes.
    pub max_ram: u64,
    /// Logarithm of zstd's window, 10 to 31: the memory that the other end makes this one allocate.
    pub window_log: u32,
    /// What has to be kept here of what came last, in bytes, where the guest's RAM cannot be read.
    pub versions: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_ram: DEFAULT_MAX_RAM, window_log: DEFAULT_WINDOW_LOG, versions: DEFAULT_VERSIONS }
    }
}
