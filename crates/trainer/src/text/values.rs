//! Records that are parts of one JSON value: the elements of a list, or objects one after the other that
//! go over several lines. Finds where each ends without parsing it, so that a list larger than memory is
//! read in blocks; what is between the braces is `record`'s.

use std::ops::Range;

/// The next value and where it ends: over space, commas and what begins and ends a list. None if
/// there is none, or if it does not end within the bytes and more may come.
pub(super) fn value(bytes: &[u8], is_last: bool) -> Option<Range<usize>> {
    let is_between = |byte: &u8| byte.is_ascii_whitespace() || matches!(byte, b',' | b']');
    let start = bytes.iter().position(|byte| !is_between(byte))?;
    let (mut depth, mut is_text, mut is_escaped) = (0_usize, false, false);
    for (at, byte) in (start..).zip(&bytes[start..]) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth > 1 => depth -= 1,
            b'}' => return Some(start..at + 1),
            b']' if depth == 1 => return Some(start..at + 1),
            // A number or a word, which is no record.
            _ if depth == 0 && is_between(byte) => return Some(start..at),
            _ => {}
        }
    }
    is_last.then_some(start..bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<&str> {
        let (mut at, mut found) = (0, Vec::new());
        while let Some(range) = value(&text.as_bytes()[at..], true) {
            found.push(&text[at + range.start..at + range.end]);
            at += range.end;
        }
        found
    }

    #[test]
    fn values_end_where_their_braces_do() {
        let nested = "{\"a\": [{\"b\": \"}]\\\"{\"}, 2],\n \"c\": {}}";
        assert_eq!(values(&format!("{nested}, {nested}\n]\n")), [nested, nested]);
        assert_eq!(values("{}\n{\n}\n"), ["{}", "{\n}"]);
        assert_eq!(values("\"a, b\", 7, null, [1, [2]]]"), ["\"a, b\"", "7", "null", "[1, [2]]"]);
        assert_eq!(values("{\"cut\": \"off"), ["{\"cut\": \"off"]);
        assert_eq!(values(" ]\n"), [""; 0]);
    }

    #[test]
    fn a_value_that_goes_on_is_waited_for() {
        let text = br#"{"a": "\\\"}", "b": [1]}"#;
        for at in 0..text.len() {
            assert_eq!(value(&text[..at], false), None, "{at}");
        }
        assert_eq!(value(text, false), Some(0..text.len()));
    }
}
