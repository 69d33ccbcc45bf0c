//! The way to the terminal. Names, prompts, captions and generated texts come from strangers, and a terminal obeys what
//! it is sent: it moves the cursor, sets its title, answers as if somebody had typed. Everything is printed through
//! [`stdout`] and [`stderr`], which show control characters instead and let nothing pass but line ends, tabs and our own
//! styles. What is shown is `\u001b` as in JSON, so that `--json` stays what it was.

use std::borrow::Cow;
use std::io::{self, Write};

use anstream::AutoStream;

/// The styles of our pages, as SGR parameters: reset, bold, dim, red, green, yellow, cyan.
const STYLES: [&str; 7] = ["0", "1", "2", "31", "32", "33", "36"];

/// Standard output, with styles where they are wanted.
pub fn stdout() -> SafeWriter<AutoStream<io::Stdout>> {
    SafeWriter::new(anstream::stdout())
}

/// Standard error, likewise.
pub fn stderr() -> SafeWriter<AutoStream<io::Stderr>> {
    SafeWriter::new(anstream::stderr())
}

/// Text as it may be sent to a terminal.
pub fn safe(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_dangerous) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    let rest = push_safe(text, &mut shown);
    push_shown(rest, &mut shown);
    Cow::Owned(shown)
}

/// Adds what can be decided; the rest is the beginning of what may be a style.
fn push_safe<'a>(mut text: &'a str, shown: &mut String) -> &'a str {
    while let Some(at) = text.find(is_dangerous) {
        shown.push_str(&text[..at]);
        text = &text[at..];
        match beginning(text) {
            Beginning::Style(length) => {
                let (style, rest) = text.split_at(length);
                shown.push_str(style);
                text = rest;
            }
            Beginning::Unknown => return text,
            Beginning::Other => {
                let mut chars = text.chars();
                push_shown(chars.next().map_or("", |c| &text[..c.len_utf8()]), shown);
                text = chars.as_str();
            }
        }
    }
    shown.push_str(text);
    ""
}

/// What a text with a control character in front begins with.
enum Beginning {
    /// One of our styles, of so many bytes.
    Style(usize),
    /// What may become one.
    Unknown,
    Other,
}

fn beginning(text: &str) -> Beginning {
    let styles = || STYLES.iter().map(|style| format!("\x1b[{style}m"));
    if let Some(style) = styles().find(|style| text.starts_with(style)) {
        return Beginning::Style(style.len());
    }
    if styles().any(|style| style.starts_with(text)) {
        Beginning::Unknown
    } else {
        Beginning::Other
    }
}

/// What a terminal obeys, or what makes it show letters in another order than they are in.
fn is_dangerous(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t')
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}')
}

fn push_shown(text: &str, shown: &mut String) {
    use std::fmt::Write;
    for c in text.chars() {
        if is_dangerous(c) {
            // All of them have four digits.
            _ = write!(shown, "\\u{:04x}", u32::from(c));
        } else {
            shown.push(c);
        }
    }
}

/// Shows what would be obeyed, however it is cut into pieces.
pub struct SafeWriter<W: Write> {
    inner: W,
    /// The beginning of a character or of a style.
    pending: Vec<u8>,
}

impl<W: Write> SafeWriter<W> {
    fn new(inner: W) -> Self {
        Self { inner, pending: Vec::new() }
    }

    fn put(&mut self, is_end: bool) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.pending);
        let mut shown = String::new();
        let mut rest = &bytes[..];
        loop {
            let (text, broken) = match std::str::from_utf8(rest) {
                Ok(text) => (text, None),
                Err(error) => {
                    let (valid, _) = rest.split_at(error.valid_up_to());
                    (std::str::from_utf8(valid).unwrap_or_default(), Some(error.error_len()))
                }
            };
            let left = push_safe(text, &mut shown);
            rest = &rest[text.len() - left.len()..];
            match broken {
                // Not text at all.
                Some(Some(length)) => {
                    push_shown(left, &mut shown);
                    shown.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[left.len() + length..];
                }
                _ => break,
            }
        }
        if is_end {
            push_shown(&String::from_utf8_lossy(rest), &mut shown);
        } else {
            self.pending = rest.to_vec();
        }
        self.inner.write_all(shown.as_bytes())
    }
}

impl<W: Write> Write for SafeWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        self.put(false)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.put(true)?;
        self.inner.flush()
    }
}

impl<W: Write> Drop for SafeWriter<W> {
    fn drop(&mut self) {
        // Whoever wants to know whether that worked flushes.
        _ = self.put(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{BAD, BOLD, DIM, GOOD, WARN};

    #[test]
    fn what_a_terminal_obeys_is_shown() {
        for (text, expected) in [
            ("a\tb\nc ä 狐 🦊", "a\tb\nc ä 狐 🦊"),
            ("\x1b]0;title\x07", "\\u001b]0;title\\u0007"),
            ("\x1b[2J\x1b[31;1m\x1b[8m", "\\u001b[2J\\u001b[31;1m\\u001b[8m"),
            ("a\rb\x08\x7f\u{9b}31m", "a\\u000db\\u0008\\u007f\\u009b31m"),
            ("gpj.\u{202e}exe\u{2066}", "gpj.\\u202eexe\\u2066"),
            ("cut \x1b[3", "cut \\u001b[3"),
        ] {
            assert_eq!(safe(text), expected);
        }
    }

    #[test]
    fn our_styles_pass() {
        for style in [BOLD, DIM, GOOD, WARN, BAD] {
            let text = format!("{style}text{style:#}");
            assert_eq!(safe(&text), text);
        }
        let cyan = anstyle::AnsiColor::Cyan.on_default().bold().to_string();
        assert_eq!(safe(&cyan), cyan);
    }

    #[test]
    fn pieces_are_seen_as_a_whole() {
        let text = "ä \x1b[1mbold\x1b[0m \x1b]0;x\x07 \u{202e} 🦊 \x1b[3".as_bytes();
        let expected = safe(std::str::from_utf8(text).unwrap()).into_owned();
        for size in 1..text.len() {
            let mut written = Vec::new();
            let mut writer = SafeWriter::new(&mut written);
            text.chunks(size).for_each(|piece| writer.write_all(piece).unwrap());
            drop(writer);
            assert_eq!(String::from_utf8(written).unwrap(), expected, "{size}");
        }
        let mut written = Vec::new();
        SafeWriter::new(&mut written).write_all(b"a\xffb\xe2\x80").unwrap();
        assert_eq!(String::from_utf8(written).unwrap(), "a\u{fffd}b\u{fffd}");
    }
}
