//! Prompts as some families clean them before they are encoded: HTML entities become characters, twice over, and white space
//! a single space. The original program repairs wrongly decoded text too (with the library ftfy, where that is installed);
//! captions from files are UTF-8, and are left as they are.

use std::borrow::Cow;

/// Named entities: name and character, with a star where the semicolon may be left out. Taken: Python's `html.entities`,
/// those of HTML 4 and of older browsers; the 1979 others of HTML 5 are left as they are.
const ENTITIES: &str = include_str!("html_entities.txt");

/// Taken: Python's `html`, the characters of Windows-1252 from 0x80 on; 0 where there is none.
const WINDOWS_1252: [u16; 32] = [
    0x20ac, 0x81, 0x201a, 0x0192, 0x201e, 0x2026, 0x2020, 0x2021, 0x02c6, 0x2030, 0x0160, 0x2039,
    0x0152, 0x8d, 0x017d, 0x8f, 0x90, 0x2018, 0x2019, 0x201c, 0x201d, 0x2022, 0x2013, 0x2014,
    0x02dc, 0x2122, 0x0161, 0x203a, 0x0153, 0x9d, 0x017e, 0x0178,
];

/// The longest name of an entity that is looked for, as in Python.
const LONGEST_NAME: usize = 32;

/// A prompt, cleaned.
pub fn clean_prompt(text: &str) -> String {
    let text = unescape(&unescape(text)).into_owned();
    let words: Vec<&str> = text.split(is_space).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

/// White space as Python has it: Unicode's, and four control characters.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&character)
}

/// The text with characters instead of entities.
fn unescape(text: &str) -> Cow<'_, str> {
    if !text.contains('&') {
        return text.into();
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let found = match rest.strip_prefix('#') {
            Some(number) => numbered(number).map(|(character, n)| (character, n + 1)),
            None => named(rest),
        };
        match found {
            Some((character, length)) => {
                out.extend(character);
                rest = &rest[length..];
            }
            None => out.push('&'),
        }
    }
    out.push_str(rest);
    out.into()
}

/// The character of a number after `&#`, none if it stands for nothing, and how many bytes it takes.
fn numbered(text: &str) -> Option<(Option<char>, usize)> {
    let (digits, radix, skipped) = match text.strip_prefix(['x', 'X']) {
        Some(digits) => (digits, 16, 1),
        None => (text, 10, 0),
    };
    let n = digits.bytes().take_while(|byte| char::from(*byte).is_digit(radix)).count();
    if n == 0 {
        return None;
    }
    // A number that is too large stands for no character.
    let code = u32::from_str_radix(&digits[..n], radix).unwrap_or(u32::MAX);
    let end = skipped + n + usize::from(digits[n..].starts_with(';'));
    Some((of_code(code), end))
}

fn of_code(code: u32) -> Option<char> {
    match code {
        0 => Some(char::REPLACEMENT_CHARACTER),
        0x80..=0x9f => char::from_u32(WINDOWS_1252[code as usize - 0x80].into()),
        0x0d => Some('\r'),
        1..=8 | 0x0b | 0x0e..=0x1f | 0x7f | 0xfdd0..=0xfdef => None,
        code if code & 0xfffe == 0xfffe && code <= 0x10_ffff => None,
        code => Some(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
    }
}

/// The character of a name after `&`, and how many bytes it takes: the whole name with its semicolon, or the longest of those
/// that go without one.
fn named(text: &str) -> Option<(Option<char>, usize)> {
    let ends = |character: char| "\t\n\u{c} <&#;".contains(character);
    let length: usize =
        text.chars().take_while(|it| !ends(*it)).take(LONGEST_NAME).map(char::len_utf8).sum();
    let (name, after) = text.split_at(length);
    let entities = || ENTITIES.lines().filter_map(entity);
    let whole = entities().find(|entity| after.starts_with(';') && entity.name == name);
    let prefix = || {
        let fits = entities().filter(|entity| entity.is_bare && name.starts_with(entity.name));
        fits.max_by_key(|entity| entity.name.len())
    };
    let is_whole = whole.is_some();
    let found = whole.or_else(prefix)?;
    Some((Some(found.character), found.name.len() + usize::from(is_whole)))
}

/// A line of the table.
struct Entity {
    name: &'static str,
    character: char,
    /// Whether the semicolon may be left out.
    is_bare: bool,
}

fn entity(line: &'static str) -> Option<Entity> {
    let mut words = line.split(' ');
    let (name, code) = (words.next()?, words.next()?);
    let character = char::from_u32(u32::from_str_radix(code, 16).ok()?)?;
    Some(Entity { name, character, is_bare: words.next().is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt, and what the reference makes of it.
    const EXPECTED: [(&str, &str); 20] = [
        ("a  fox\n in\tthe snow ", "a fox in the snow"),
        ("", ""),
        ("   ", ""),
        ("AT&T & sons", "AT&T & sons"),
        ("Tom &amp; Jerry", "Tom & Jerry"),
        ("&amp;amp;lt;b&amp;gt;", "&lt;b>"),
        ("&lt;b&gt", "<b>"),
        ("&copy 2025 &copy2025 &notit; &not", "\u{a9} 2025 \u{a9}2025 \u{ac}it; \u{ac}"),
        (
            "5 &#62 4 &#x3E;3 &#128; &#0; &#xD800; &#x110000; &#99999999999;",
            "5 > 4 >3 \u{20ac} \u{fffd} \u{fffd} \u{fffd} \u{fffd}",
        ),
        ("a&#1;b&#11;c&#13;d", "abc d"),
        ("&quot;caf&eacute;&quot; &mdash; na&iuml;ve", "\"caf\u{e9}\" \u{2014} na\u{ef}ve"),
        ("&unknown; &; &#; &#x;", "&unknown; &; &#; &#x;"),
        ("x\u{a0}y\u{2003}z\u{1e}w", "x y z w"),
        ("&nbsp;fox&nbsp;&nbsp;owl", "fox owl"),
        ("&ampersand", "&ersand"),
        ("&lang;&rang;&hearts;", "\u{27e8}\u{27e9}\u{2665}"),
        ("&#xfffe;&#x1ffff;.", "."),
        ("&AMP;&QUOT", "&\""),
        ("&Eacutee", "\u{c9}e"),
        (
            "&notanentitythatisverylongandgoesonandon;",
            "\u{ac}anentitythatisverylongandgoesonandon;",
        ),
    ];

    /// As Python's `html.unescape` twice, then white space to one space.
    #[test]
    fn prompts_are_cleaned_as_by_the_reference() {
        for (given, expected) in EXPECTED {
            assert_eq!(clean_prompt(given), expected, "{given:?}");
        }
    }
}
