//! Reading numbers and slices off the front of bytes that may have been cut anywhere.

/// Why a token could not be read.
#[derive(Debug)]
pub(crate) enum Stop<E> {
    /// It goes on in bytes that have not come yet.
    More,
    /// It can never be one.
    Bad(E),
}

/// There are not enough bytes yet.
#[derive(Debug)]
pub(crate) struct More;

impl<E> From<More> for Stop<E> {
    fn from(_: More) -> Self {
        Self::More
    }
}

/// A place in a slice. Every method either advances or says [`More`].
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How much was read.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// All that was read.
    pub(crate) fn seen(&self) -> &'a [u8] {
        &self.bytes[..self.at]
    }

    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], More> {
        let taken = self.bytes[self.at..].get(..n).ok_or(More)?;
        self.at += n;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], More> {
        let taken = self.bytes[self.at..].first_chunk().ok_or(More)?;
        self.at += N;
        Ok(taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, More> {
        Ok(u8::from_be_bytes(*self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, More> {
        Ok(u16::from_be_bytes(*self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, More> {
        Ok(u32::from_be_bytes(*self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, More> {
        Ok(u64::from_be_bytes(*self.array()?))
    }

    /// One byte of length, then so many bytes: QEMU's strings.
    pub(crate) fn counted(&mut self) -> Result<&'a [u8], More> {
        let len = self.u8()?;
        self.take(usize::from(len))
    }
}
