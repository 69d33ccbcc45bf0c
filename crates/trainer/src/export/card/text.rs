//! Escaping of a job's texts for the languages of a model card: YAML, Markdown, Python, the shell.

use std::fmt::Write;

/// Text as YAML reads it back to the letter: in double quotes, escaped as JSON, which is YAML. What
/// YAML takes for a line break or for unprintable, and JSON does not, is escaped too.
pub fn yaml(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\0'..'\u{20}'
            | '\u{7f}'..='\u{9f}'
            | '\u{2028}'
            | '\u{2029}'
            | '\u{feff}'
            | '\u{fffe}'
            | '\u{ffff}' => {
                _ = write!(out, "\\u{:04x}", c as u32);
            }
            _ => out.push(c),
        }
    }
    format!("\"{out}\"")
}

/// Text that Markdown shows as it is, on one line.
pub fn plain(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '#' | '&' | '~' | '!' => {
                out.extend(['\\', c]);
            }
            _ if c.is_control() => out.push(' '),
            _ => out.push(c),
        }
    }
    out
}

/// Text between single backquotes.
pub fn code(text: &str) -> String {
    text.replace(|c: char| c == '`' || c.is_control(), " ")
}

/// A text in Python; JSON's escapes mean the same there.
pub fn python(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// One word of a shell's line.
pub fn shell(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.into();
    }
    format!("'{}'", text.replace(char::is_control, " ").replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODD: &str =
        "a: \"fox\" #1\n- it's \\ `now` \u{85}\u{2028}\t\u{7}| <b> 狐 🦊 & {x: [y]} %";

    /// Expected values are what `PyYAML` 6.0.3 and `CPython` 3.11 read back as the text itself.
    #[test]
    fn odd_text_is_held_to_the_letter() {
        assert_eq!(
            yaml(ODD),
            r#""a: \"fox\" #1\n- it's \\ `now` \u0085\u2028\u0009\u0007| <b> 狐 🦊 & {x: [y]} %""#
        );
        assert_eq!(yaml(""), "\"\"");
        assert_eq!(yaml("no"), "\"no\"");
        assert_eq!(python("a \"fox\"\n\\"), r#""a \"fox\"\n\\""#);
    }

    #[test]
    fn a_shell_and_markdown_take_odd_text_for_text() {
        assert_eq!(shell("adapter/fox.safetensors"), "adapter/fox.safetensors");
        assert_eq!(shell("it's $HOME\n`x`"), r"'it'\''s $HOME `x`'");
        assert_eq!(shell(""), "''");
        assert_eq!(plain("a|b <i>*x*\n[y](z)"), r"a\|b \<i\>\*x\* \[y\](z)");
        assert_eq!(code("a`b\nc"), "a b c");
    }
}
