//! What of a caption is taken in a step: all of it, one of its lines, or one of its lines with one of each `{red|blue}` in
//! it. All texts that can come of it are known beforehand, so that they can be encoded.
//!
//! Wildcards are those of kohya's sd-scripts: `{a|b|c}`, `{{` and `}}` for braces, not nested.

/// What of a caption is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptionChoice {
    /// All of it.
    #[default]
    Whole,
    /// One of its lines.
    Line,
    /// The same, and of each wildcard in it one of its alternatives.
    Wildcards,
}

/// Choices of the wildcards of a line, at most. Chosen: each is encoded beforehand and takes some megabytes.
const MOST_CHOICES: usize = 16;

impl CaptionChoice {
    /// The text that a random number chooses; 0 chooses the first of everything.
    pub fn text(self, caption: &str, draw: u64) -> String {
        if self == Self::Whole {
            return caption.to_owned();
        }
        let lines = lines(caption);
        let n_lines = lines.len() as u64;
        let line = self.line(lines[(draw % n_lines) as usize]);
        line.text((draw / n_lines % line.n_choices() as u64) as usize)
    }

    /// Every text that a number can choose, the first of them first.
    pub fn all_texts(self, caption: &str) -> Vec<String> {
        if self == Self::Whole {
            return vec![caption.to_owned()];
        }
        let of_line = |line: &&str| {
            let line = self.line(line);
            (0..line.n_choices()).map(|choice| line.text(choice)).collect::<Vec<_>>()
        };
        lines(caption).iter().flat_map(of_line).collect()
    }

    fn line(self, line: &str) -> CaptionLine {
        match self {
            Self::Wildcards => CaptionLine::parse(line),
            Self::Whole | Self::Line => CaptionLine(vec![CaptionPart::Text(line.to_owned())]),
        }
    }
}

/// The lines of a caption that are not blank; of an empty one, one that is empty.
fn lines(caption: &str) -> Vec<&str> {
    let lines: Vec<&str> = caption.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.is_empty() { vec![""] } else { lines }
}

/// A line of a caption, cut at its wildcards.
struct CaptionLine(Vec<CaptionPart>);

enum CaptionPart {
    Text(String),
    /// At least one.
    Alternatives(Vec<String>),
}

/// A letter, and whether it is a brace that begins or ends a wildcard.
type Letter = (char, bool);

impl CaptionLine {
    fn parse(line: &str) -> Self {
        let letters = letters(line);
        let (mut parts, mut text, mut at) = (Vec::new(), String::new(), 0);
        while let Some(letter) = letters.get(at) {
            let inner = (*letter == ('{', true)).then(|| wildcard(&letters[at + 1..])).flatten();
            let Some(inner) = inner else {
                text.push(letter.0);
                at += 1;
                continue;
            };
            parts.push(CaptionPart::Text(std::mem::take(&mut text)));
            let inner_text: String = inner.iter().map(|(letter, _)| letter).collect();
            parts.push(CaptionPart::Alternatives(
                inner_text.split('|').map(str::to_owned).collect(),
            ));
            at += inner.len() + 2;
        }
        parts.push(CaptionPart::Text(text));
        Self(parts)
    }

    fn alternatives(&self) -> impl Iterator<Item = usize> {
        self.0.iter().filter_map(|part| match part {
            CaptionPart::Text(_) => None,
            CaptionPart::Alternatives(all) => Some(all.len()),
        })
    }

    fn n_choices(&self) -> usize {
        self.alternatives().fold(1, |n, alternatives| MOST_CHOICES.min(n * alternatives))
    }

    /// Every combination, where there are few. Else each alternative about equally often, in mixed company.
    fn text(&self, choice: usize) -> String {
        let n_combinations = self.alternatives().fold(1, usize::saturating_mul);
        let (mut text, mut rest, mut wildcard) = (String::new(), choice, 0);
        for part in &self.0 {
            match part {
                CaptionPart::Text(own) => text.push_str(own),
                CaptionPart::Alternatives(all) if n_combinations <= MOST_CHOICES => {
                    text.push_str(&all[rest % all.len()]);
                    rest /= all.len();
                }
                CaptionPart::Alternatives(all) => {
                    text.push_str(&all[spread(choice, wildcard, all.len())]);
                    wildcard += 1;
                }
            }
        }
        text
    }
}

/// Braces that are written twice are letters.
fn letters(line: &str) -> Vec<Letter> {
    let (mut letters, mut rest) = (Vec::new(), line.chars().peekable());
    while let Some(letter) = rest.next() {
        let is_brace = letter == '{' || letter == '}';
        let is_letter = is_brace && rest.next_if_eq(&letter).is_some();
        letters.push((letter, is_brace && !is_letter));
    }
    letters
}

/// What is in a wildcard that has just begun; none if nothing is, or it does not end.
fn wildcard(letters: &[Letter]) -> Option<&[Letter]> {
    let end = letters.iter().position(|letter| *letter == ('}', true))?;
    (end > 0).then_some(&letters[..end])
}

/// The alternative of `n` that a wildcard has in a choice: all of them one after the other, in an order of its own. The
/// first choice has the first of each.
fn spread(choice: usize, wildcard: usize, n: usize) -> usize {
    let mut order: Vec<usize> = (0..n).collect();
    let (round, place) = (choice / n, choice % n);
    // In the first round the first stays where it is.
    let first = usize::from(round == 0);
    super::caption::shuffle(&mut order[first..], (round << 16 | wildcard) as u64 + 1);
    order[place]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn wildcards_are_those_of_sd_scripts() {
        for (line, expected) in [
            ("a dog", &["a dog"][..]),
            ("a {red|blue} dog", &["a red dog", "a blue dog"]),
            ("{a|b} {1|2}", &["a 1", "b 1", "a 2", "b 2"]),
            ("a {|big} dog", &["a  dog", "a big dog"]),
            ("a {red} dog", &["a red dog"]),
            ("a {{red|blue}} dog", &["a {red|blue} dog"]),
            ("a {} {red|blue", &["a {} {red|blue"]),
            ("red|blue} {x|y}", &["red|blue} x", "red|blue} y"]),
            ("{rot|größer}", &["rot", "größer"]),
            ("", &[""]),
        ] {
            assert_eq!(CaptionChoice::Wildcards.all_texts(line), expected);
        }
    }

    #[test]
    fn lines_are_chosen_where_they_are_not_blank() {
        let caption = "a dog\n\n  a {red|blue} cat \n";
        for (choice, expected) in [
            (CaptionChoice::Whole, &[caption][..]),
            (CaptionChoice::Line, &["a dog", "a {red|blue} cat"]),
            (CaptionChoice::Wildcards, &["a dog", "a red cat", "a blue cat"]),
        ] {
            assert_eq!(choice.all_texts(caption), expected);
            assert_eq!(choice.text(caption, 0), expected[0]);
        }
        assert_eq!(CaptionChoice::Line.all_texts(" \n "), [""]);
    }

    #[test]
    fn lines_are_equally_frequent_whatever_their_wildcards() {
        let caption = "a dog\na {red|blue} cat";
        let count = |text: &str| {
            let texts = (0..400).map(|draw| CaptionChoice::Wildcards.text(caption, draw));
            texts.filter(|chosen| chosen == text).count()
        };
        assert_eq!(["a dog", "a red cat", "a blue cat"].map(count), [200, 100, 100]);
    }

    #[test]
    fn of_many_combinations_some_are_seen_with_every_alternative() {
        let options: Vec<String> = (0..12).map(|n| format!("o{n}")).collect();
        let caption = format!("{{{0}}} {{{0}}} {{x|y}}", options.join("|"));
        let texts = CaptionChoice::Wildcards.all_texts(&caption);
        assert_eq!(texts.len(), MOST_CHOICES);
        assert_eq!(texts[0], "o0 o0 x");
        let words = |place: usize| -> BTreeSet<&str> {
            texts.iter().filter_map(|text| text.split(' ').nth(place)).collect()
        };
        assert_eq!([words(0).len(), words(1).len(), words(2).len()], [12, 12, 2]);
        let pairs: BTreeSet<&str> = texts.iter().map(|text| &text[..text.len() - 2]).collect();
        assert!(pairs.len() > 12, "{texts:?}");
        let chosen: BTreeSet<String> =
            (0..1000).map(|draw| CaptionChoice::Wildcards.text(&caption, draw * 7919)).collect();
        assert_eq!(chosen, texts.into_iter().collect());
    }
}
