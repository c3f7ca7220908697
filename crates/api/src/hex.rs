//! Bytes as text: two hexadecimal digits each.

/// Bytes as text.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    digits.map(char::from).collect()
}

/// The bytes of such a text; none where it is none.
#[must_use]
pub fn bytes(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c.to_digit(16)?).ok()).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_from_their_text_and_what_is_no_such_text_is_none() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes(&text(&all)), Some(all));
        assert_eq!((bytes("0"), bytes("0g"), bytes("é0"), bytes("")), (None, None, None, Some(vec![])));
    }
}
