//! A summary of the problems of a job's files: counted by reason, with the first names. A scan lists every
//! file (`Problem`); a run reports this summary, also in events.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::problem::{Problem, ProblemKind};

/// Names that are given for each reason. Chosen: enough to go and look.
const N_NAMED: usize = 3;

/// What of a dataset is not trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// What is counted: `image`, `sample`, `file` or `record`.
    pub unit: String,
    /// How many are left out.
    pub left_out: usize,
    /// Of how many.
    pub of: usize,
    /// Why, the most frequent reason first.
    pub reasons: Vec<LeftOutReason>,
}

/// Files with one thing in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOutReason {
    /// What it is, in a few words.
    pub reason: String,
    /// How many there are.
    pub count: usize,
    /// The names of the first of them.
    pub first: Vec<String>,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, left_out, of, reasons } = self;
        let plural = if *of == 1 { "" } else { "s" };
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        write!(f, "{left_out} of {of} {unit}{plural} left out: {}", reasons.join(", "))
    }
}

impl fmt::Display for LeftOutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.count > self.first.len() { ", …" } else { "" };
        write!(f, "{} {} ({}{more})", self.count, self.reason, self.first.join(", "))
    }
}

/// The summary of a dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What is not trained on.
    pub left_out: Vec<LeftOut>,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Notes.
    pub notes: Vec<String>,
}

impl Findings {
    /// Of images, of which `n_used` are trained on or held out.
    pub fn of_images(problems: &[Problem], n_used: usize) -> Self {
        Self::of_samples(problems, n_used, "image")
    }

    /// The same under another name, as clips are no images.
    pub fn of_samples(problems: &[Problem], n_used: usize, unit: &'static str) -> Self {
        let is_sample = |problem: &&Problem| problem.is_skipped && problem.kind.is_of_image();
        Self::new(problems, &[(unit, n_used, &is_sample)])
    }

    /// Of texts: whole files, and records in them.
    pub fn of_texts(problems: &[Problem], n_files: usize, n_records: usize) -> Self {
        let is_file = |problem: &&Problem| problem.is_skipped && !problem.kind.is_of_record();
        let is_record = |problem: &&Problem| problem.is_skipped && problem.kind.is_of_record();
        Self::new(problems, &[("file", n_files, &is_file), ("record", n_records, &is_record)])
    }

    /// `sets` are what is counted, how many are used, and which problems are theirs.
    fn new(problems: &[Problem], sets: &[ProblemSet<'_>]) -> Self {
        let left_out = sets.iter().filter_map(|(unit, n_used, is_theirs)| {
            let reasons = by_reason(problems.iter().filter(is_theirs));
            let n: usize = reasons.iter().map(|reason| reason.count).sum();
            let unit = (*unit).to_owned();
            (n > 0).then_some(LeftOut { unit, left_out: n, of: n_used + n, reasons })
        });
        let left_out = left_out.collect();
        let rest = problems
            .iter()
            .filter(|problem| !sets.iter().any(|(_, _, is_theirs)| is_theirs(problem)));
        let (notes, warnings): (Vec<_>, Vec<_>) = rest.partition(|problem| problem.kind.is_note());
        Self { left_out, warnings: summary_lines(&warnings), notes: summary_lines(&notes) }
    }
}

/// Why nothing is left, for an error: a clause for each reason, the first file of each in full.
pub(crate) fn explained(problems: &[Problem]) -> Option<String> {
    let skipped: Vec<&Problem> = problems.iter().filter(|problem| problem.is_skipped).collect();
    let clause = |reason: LeftOutReason| {
        let first = skipped.iter().find(|problem| problem.kind.reason() == reason.reason)?;
        let count = if reason.count > 1 { format!("{reason}, such as ") } else { String::new() };
        Some(format!("{count}{first}"))
    };
    let clauses: Vec<String> =
        by_reason(skipped.iter().copied()).into_iter().filter_map(clause).collect();
    (!clauses.is_empty()).then(|| clauses.join("; "))
}

type ProblemSet<'a> = (&'static str, usize, &'a dyn Fn(&&Problem) -> bool);

/// A line for each reason; a problem that occurs once is given in full.
fn summary_lines(problems: &[&Problem]) -> Vec<String> {
    let line = |reason: LeftOutReason| {
        let mut same = problems.iter().filter(|problem| problem.kind.reason() == reason.reason);
        match (same.next(), reason.count) {
            (Some(problem), 1) => problem.to_string(),
            _ => reason.to_string(),
        }
    };
    by_reason(problems.iter().copied()).into_iter().map(line).collect()
}

/// The most frequent first.
fn by_reason<'a>(problems: impl Iterator<Item = &'a Problem>) -> Vec<LeftOutReason> {
    let mut found = BTreeMap::<String, LeftOutReason>::new();
    for problem in problems {
        let reason = problem.kind.reason();
        let entry = found.entry(reason.clone()).or_insert(LeftOutReason {
            reason,
            count: 0,
            first: Vec::new(),
        });
        entry.count += problem.kind.count();
        let name = problem.path.file_name().unwrap_or(problem.path.as_os_str());
        let name = match problem.kind {
            ProblemKind::Text { at: Some(at), .. } => format!("{} {at}", name.display()),
            _ => name.display().to_string(),
        };
        if entry.first.len() < N_NAMED && !entry.first.contains(&name) {
            entry.first.push(name);
        }
    }
    let mut reasons: Vec<LeftOutReason> = found.into_values().collect();
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(name: &str) -> Problem {
        Problem::skipped(name, ProblemKind::TooSmall { size: [9, 9], least: 64 })
    }

    #[test]
    fn what_is_left_out_is_counted_by_reason() {
        let unreadable = ProblemKind::Unreadable { why: "permission denied".into() };
        let problems = [
            small("in/c.png"),
            Problem::skipped("in/a.png", unreadable.clone()),
            Problem::skipped("in/b.png", unreadable),
            Problem::warning("in/d.png", ProblemKind::CaptionMissing),
            Problem::skipped(
                "in/metadata.jsonl",
                ProblemKind::MetadataMissingFile { line: 3, name: "x.png".into() },
            ),
        ];
        let found = Findings::of_images(&problems, 24);
        assert_eq!(
            found.left_out[0].to_string(),
            "3 of 27 images left out: 2 unreadable (a.png, b.png), 1 smaller than 64 px (c.png)"
        );
        assert_eq!(found.left_out.len(), 1);
        assert_eq!(
            found.warnings,
            [
                "in/d.png has no caption: an empty one is taken",
                "in/metadata.jsonl line 3 names a missing file: x.png",
            ]
        );
        assert_eq!(Findings::of_images(&problems[3..4], 1).left_out, []);
    }

    #[test]
    fn of_many_a_few_are_named() {
        let many: Vec<Problem> = (0..100).map(|at| small(&format!("{at:02}.png"))).collect();
        let said = Findings::of_images(&many, 0).left_out[0].to_string();
        assert_eq!(
            said,
            "100 of 100 images left out: 100 smaller than 64 px (00.png, 01.png, 02.png, …)"
        );
    }
}
