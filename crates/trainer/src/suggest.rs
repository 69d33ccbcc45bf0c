//! Suggestions for mistyped keys: the known word with the smallest edit distance.

/// The suggestion for a key that does not exist. `section` is the path it was typed under (empty at
/// the top), `known` are the pairs of section and key that exist.
pub(super) fn suggestion(section: &str, name: &str, known: &[(&str, &str)]) -> String {
    let homes: Vec<_> =
        known.iter().filter(|(_, key)| *key == name).map(|(home, _)| format!("[{home}]")).collect();
    if !homes.is_empty() {
        return format!("`{name}` belongs to {}", homes.join(" or "));
    }
    let here = known.iter().filter(|(home, _)| *home == section).map(|(_, key)| *key);
    if let Some(near) = nearest(name, here.clone()) {
        return format!("did you mean `{section}.{near}`?");
    }
    let near = nearest(name, known.iter().map(|(_, key)| *key));
    let pair = near.and_then(|near| known.iter().find(|(_, key)| *key == near));
    match pair {
        Some((home, near)) => format!("did you mean `{home}.{near}`?"),
        None if section.is_empty() => {
            let mut sections: Vec<_> = known.iter().map(|(home, _)| format!("[{home}]")).collect();
            sections.dedup();
            format!("a job has {}", sections.join(", "))
        }
        None => format!("[{section}] has {}", here.collect::<Vec<_>>().join(", ")),
    }
}

/// The word nearest to another, if it is near at all. Chosen: a third of the letters may differ; with
/// half of them `name` would be taken for `base`.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (edits, near) = known.map(|known| (edits(word, known), known)).min_by_key(|(n, _)| *n)?;
    let longest = word.chars().count().max(near.chars().count());
    (edits <= (longest / 3).max(1)).then_some(near)
}

/// Letters to insert, remove, replace or swap with their neighbour (optimal string alignment).
fn edits(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut fewest = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                fewest = fewest.min(rows[i - 2][j - 2] + 1);
            }
            row.push(fewest);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (from, to, n) in [
            ("steps", "steps", 0),
            ("stepps", "steps", 1),
            ("setps", "steps", 1),
            ("", "rank", 4),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(edits(from, to), n, "{from} {to}");
            assert_eq!(edits(to, from), n, "{to} {from}");
        }
    }

    #[test]
    fn far_words_are_not_near() {
        assert_eq!(nearest("gradient", ["rank", "alpha"].into_iter()), None);
        assert_eq!(nearest("rnak", ["rank", "alpha"].into_iter()), Some("rank"));
    }
}
