//! YAML as trainers in Python read it: plain scalars become numbers, flags or nothing by YAML 1.1's words, and `1e-4`
//! is a number, which every one of them sees to. A file from a stranger may nest deeply or repeat itself without end by
//! aliases: depth and the number of values are bounded before anything is built.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

/// Chosen: no config nests a tenth of it, and no stack is short of it.
const MAX_DEPTH: usize = 64;

/// Chosen: the largest config of a trainer has some hundred values, and these take a few megabytes.
const MAX_VALUES: usize = 100_000;

/// The key of YAML 1.1 that takes over another mapping.
const MERGE: &str = "<<";

/// What a text in YAML says; several documents are refused.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let mut builder = TreeBuilder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let said = builder.take(event);
        said.map_err(|problem| format!("{problem} in line {}", span.start.line()))?;
    }
    builder.root.ok_or_else(|| "it is empty".into())
}

#[derive(Default)]
struct TreeBuilder {
    /// What is open, the outermost first.
    open: Vec<OpenNode>,
    root: Option<Value>,
    /// Values behind anchors, with the number of values in each.
    anchors: HashMap<usize, (Value, usize)>,
    n_values: usize,
}

struct OpenNode {
    anchor: usize,
    node: PartialNode,
    /// The number of values before it.
    n_before: usize,
}

enum PartialNode {
    List(Vec<Value>),
    /// With the key that waits for its value, and what stands below the table's own keys.
    Table(Map<String, Value>, Option<String>, Map<String, Value>),
}

impl TreeBuilder {
    fn take(&mut self, event: Event<'_>) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, _) => {
                let value = match style {
                    ScalarStyle::Plain => plain(&text),
                    _ => Value::String(text.into_owned()),
                };
                self.count(1)?;
                self.close(value, anchor, 1)
            }
            Event::SequenceStart(anchor, _) => self.begin(anchor, PartialNode::List(Vec::new())),
            Event::MappingStart(anchor, _) => {
                self.begin(anchor, PartialNode::Table(Map::new(), None, Map::new()))
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(anchor) => {
                let found = self.anchors.get(&anchor).cloned();
                let (value, n_values) = found.ok_or("an alias without its anchor")?;
                self.count(n_values)?;
                self.close(value, 0, n_values)
            }
            Event::DocumentStart(_) if self.root.is_some() => {
                Err("a second document, expected one".into())
            }
            _ => Ok(()),
        }
    }

    /// That so many values more are still few enough.
    fn count(&mut self, n_values: usize) -> Result<(), String> {
        self.n_values = self.n_values.saturating_add(n_values);
        if self.n_values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values, with those that aliases repeat,"));
        }
        Ok(())
    }

    fn begin(&mut self, anchor: usize, node: PartialNode) -> Result<(), String> {
        if self.open.len() >= MAX_DEPTH {
            return Err(format!("values nested more than {MAX_DEPTH} deep"));
        }
        let n_before = self.n_values;
        self.count(1)?;
        self.open.push(OpenNode { anchor, node, n_before });
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        let OpenNode { anchor, node, n_before } = self.open.pop().ok_or("an end too many")?;
        let n_values = self.n_values - n_before;
        let value = match node {
            PartialNode::List(parts) => Value::Array(parts),
            PartialNode::Table(mut table, _, merged) => {
                for (key, value) in merged {
                    table.entry(key).or_insert(value);
                }
                Value::Object(table)
            }
        };
        self.close(value, anchor, n_values)
    }

    /// Gives a whole value to what is open, or makes it the document.
    fn close(&mut self, value: Value, anchor: usize, n_values: usize) -> Result<(), String> {
        if anchor > 0 {
            // Repeated once here: an anchor within anchors would cost its values at each level.
            self.count(n_values)?;
            self.anchors.insert(anchor, (value.clone(), n_values));
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(value);
            return Ok(());
        };
        match &mut open.node {
            PartialNode::List(parts) => parts.push(value),
            PartialNode::Table(_, key @ None, _) => *key = Some(as_key(&value)?),
            PartialNode::Table(table, key, merged) => match key.take().unwrap_or_default() {
                key if key == MERGE => merge(merged, value)?,
                key if table.contains_key(&key) => return Err(format!("`{key}` twice")),
                key => _ = table.insert(key, value),
            },
        }
        Ok(())
    }
}

fn as_key(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(flag) => Ok(flag.to_string()),
        _ => Err("a key that is no word".into()),
    }
}

fn merge(merged: &mut Map<String, Value>, value: Value) -> Result<(), String> {
    let Value::Object(more) = value else {
        return Err("`<<` without a mapping".into());
    };
    for (key, value) in more {
        merged.entry(key).or_insert(value);
    }
    Ok(())
}

/// A scalar without quotes.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => {
            return Value::Bool(true);
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Value::Bool(false);
        }
        _ => {}
    }
    number(text).map_or_else(|| Value::String(text.into()), Value::Number)
}

/// A number as Python writes it, which Rust's own parsers would also find in words such as `inf`.
pub(super) fn number(text: &str) -> Option<Number> {
    let digits = text.replace('_', "");
    let is_number = digits.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c))
        && digits.contains(|c: char| c.is_ascii_digit())
        && digits.chars().all(|c| c.is_ascii_digit() || "+-.eE".contains(c));
    if !is_number {
        return None;
    }
    let whole = digits.strip_prefix('+').unwrap_or(&digits);
    match whole.parse::<i64>() {
        Ok(whole) => Some(whole.into()),
        Err(_) => digits.parse::<f64>().ok().and_then(Number::from_f64),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn scalars_are_what_python_makes_of_them() {
        let text = "a: 1e-4\nb: '1e-4'\nc: yes\nd: ~\ne: [1, 2.5, -3, .5]\nf: 1_000\ng: inf\nh: 1.2.3\ni:\n";
        let expected = json!({
            "a": 1e-4, "b": "1e-4", "c": true, "d": null, "e": [1, 2.5, -3, 0.5], "f": 1000,
            "g": "inf", "h": "1.2.3", "i": null,
        });
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn anchors_are_repeated_and_merged() {
        let text = "base: &b {lr: 1, rank: 4}\nrun:\n  <<: *b\n  rank: 8\n";
        assert_eq!(parse(text).unwrap()["run"], json!({"lr": 1, "rank": 8}));
        assert!(parse("a: *nothing\n").is_err());
    }

    #[test]
    fn what_would_fill_memory_or_the_stack_is_refused() {
        let more = ('a'..='y').zip('b'..='z').map(|(from, to)| {
            format!("{to}: &{to} [{}]\n", vec![format!("*{from}"); 9].join(", "))
        });
        let laughs: String = std::iter::once("a: &a [x, x, x, x]\n".into()).chain(more).collect();
        let refused = |text: &str, why: &str| {
            let said = parse(text).unwrap_err();
            assert!(said.contains(why), "{said}");
        };
        refused(&laughs, "more than 100000 values");
        // The parser has a limit of its own, above ours.
        refused(&"[".repeat(500_000), "recursion limit");
        refused(&format!("a: {}1{}", "{a: ".repeat(100), "}".repeat(100)), "more than 64 deep");
        refused(&format!("{}1", "- ".repeat(100)), "more than 64 deep");
        refused(&"- x\n".repeat(200_000), "more than 100000 values");
        refused("a: 1\na: 2\n", "`a` twice");
        refused("a: 1\n---\nb: 2\n", "second document");
        refused("? [a, b]\n: c\n", "no word");
        refused("", "empty");
    }
}
