//! Damage on purpose: alters a frame so that no checksum on the way notices, only whoever looks at the content.
//!
//! A check of integrity that was never seen to fail proves nothing, so a test bed has to be able to do what a broken
//! network card does. Flipping a bit would not do: TCP would drop the segment and send it again. The Internet checksum is
//! a sum of 16-bit words (RFC 1071), and a sum does not notice when two of its words change places.

/// Shortest frame that is altered: one that has room for 32 bytes of payload behind the headers of TCP with timestamps
/// inside VXLAN inside Ethernet. So acknowledgements, which are shorter, stay as they are.
pub const LEAST_ALTERED: usize = 14 + 20 + 8 + 8 + 14 + 20 + 32 + 32;

/// Swaps the last two neighbouring words of the frame that differ, within its last 32 bytes. False when the frame is too
/// short, of odd length (its words are not where they seem), or all alike there.
pub fn swap_words(frame: &mut [u8]) -> bool {
    let len = frame.len();
    if len < LEAST_ALTERED || !len.is_multiple_of(2) {
        return false;
    }
    let tail = &mut frame[len - 32..];
    for at in (0..=28).rev().step_by(2) {
        if tail[at..at + 2] != tail[at + 2..at + 4] {
            let (one, other) = tail[at..at + 4].split_at_mut(2);
            one.swap_with_slice(other);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(frame: &[u8]) -> u32 {
        let sum: u32 = frame.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        (sum & 0xffff) + (sum >> 16)
    }

    #[test]
    fn an_altered_frame_differs_but_has_the_same_checksum() {
        let before: Vec<u8> = (0..200u8).collect();
        let mut after = before.clone();
        assert!(swap_words(&mut after));
        assert_ne!(after, before);
        assert_eq!(checksum(&after), checksum(&before));
        assert_eq!(after[..168], before[..168], "only the payload's end changes");
    }

    #[test]
    fn a_frame_without_payload_or_without_difference_is_left_alone() {
        let mut acknowledgement = vec![1; LEAST_ALTERED - 2];
        assert!(!swap_words(&mut acknowledgement));
        assert!(!swap_words(&mut [7; 200]));
        assert!(!swap_words(&mut (0..201u8).collect::<Vec<_>>()));
    }
}
