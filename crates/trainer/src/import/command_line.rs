//! A training command in a shell script, as flags: continued lines, quotes and variables that the script sets itself.
//! Nothing is executed; what only a shell could know is refused.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// A command that trains.
pub(super) struct TrainingCommand {
    /// The name of the Python program, without its folder.
    pub program: String,
    /// Its flags, by name without `--`.
    pub flags: Map<String, Value>,
}

/// The one command of a script that starts a training program; nothing if there is none.
pub(super) fn find(script: &str) -> Option<Result<TrainingCommand, String>> {
    let joined = script.replace("\\\r\n", " ").replace("\\\n", " ");
    let mut variables = HashMap::new();
    let mut found = None;
    for line in joined.lines() {
        let line = line.trim();
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        if let Some((name, value)) = assignment(line) {
            variables.insert(name, value);
            continue;
        }
        if !line.contains(".py") || !line.contains(" --") {
            continue;
        }
        let command = words(line).and_then(|words| command(&words, &variables));
        match command {
            // Scripts encode data with other programs before.
            Ok(None) => {}
            Ok(Some(_)) if found.is_some() => {
                return Some(Err("it has two training commands".into()));
            }
            Ok(Some(command)) => found = Some(command),
            Err(problem) => return Some(Err(problem)),
        }
    }
    found.map(Ok)
}

/// `NAME=value` alone in a line.
fn assignment(line: &str) -> Option<(String, String)> {
    let line = line.strip_prefix("export ").unwrap_or(line);
    let (name, value) = line.split_once('=')?;
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    match words(value).ok()?.as_slice() {
        _ if !is_name => None,
        [] => Some((name.into(), String::new())),
        [one] => Some((name.into(), one.clone())),
        _ => None,
    }
}

/// The words of a line, without quotes.
fn words(line: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = line.chars();
    while let Some(c) = letters.next() {
        match quote {
            Some(end) if c == end => quote = None,
            None if c == '\'' || c == '"' => {
                word.get_or_insert_default();
                quote = Some(c);
            }
            None if c.is_whitespace() => words.extend(word.take()),
            None if c == '#' && word.is_none() => break,
            None | Some('"') if c == '\\' => word.get_or_insert_default().extend(letters.next()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".into());
    }
    words.extend(word);
    Ok(words)
}

fn command(
    words: &[String],
    variables: &HashMap<String, String>,
) -> Result<Option<TrainingCommand>, String> {
    let is_program = |word: &String| !word.starts_with('-') && word.strip_suffix(".py").is_some();
    let Some(at) = words.iter().position(is_program) else { return Ok(None) };
    let program = words[at].rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    if !program.contains("train") {
        return Ok(None);
    }
    let words: Vec<String> =
        words[at + 1..].iter().map(|word| expanded(word, variables)).collect::<Result<_, _>>()?;
    Ok(Some(TrainingCommand { program, flags: flags(&words)? }))
}

/// A word with the script's own variables in their places.
fn expanded(word: &str, variables: &HashMap<String, String>) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('$') {
        text += before;
        let is_braced = after.starts_with('{');
        let after = after.strip_prefix('{').unwrap_or(after);
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, after) = after.split_at(end.unwrap_or(after.len()));
        let value = variables.get(name);
        text += value
            .ok_or_else(|| format!("`{word}` is for a shell: the script does not set ${name}"))?;
        rest = if is_braced { after.strip_prefix('}').unwrap_or(after) } else { after };
    }
    Ok(text + rest)
}

/// Where another command of the shell begins.
fn is_end(word: &str) -> bool {
    ["&&", "||", "|", ";", "&", ">"].contains(&word)
}

/// `--name value`, `--name=value`, `--name` for a switch; several values are a list.
fn flags(words: &[String]) -> Result<Map<String, Value>, String> {
    let mut flags: Map<String, Value> = Map::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        if is_end(word) {
            break;
        }
        let name = word.strip_prefix("--").ok_or_else(|| format!("`{word}` belongs to no flag"))?;
        let (name, value) = if let Some((name, value)) = name.split_once('=') {
            (name, Value::String(value.into()))
        } else {
            let mut values = Vec::new();
            while let Some(value) = words.next_if(|word| !word.starts_with("--") && !is_end(word)) {
                values.push(Value::String(value.clone()));
            }
            let value = match values.len() {
                0 => Value::Bool(true),
                1 => values.remove(0),
                _ => Value::Array(values),
            };
            (name, value)
        };
        // The last one counts, as in Python.
        flags.insert(name.replace('-', "_"), value);
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_script_has_the_flags_of_its_training_command() {
        let script = "#!/bin/bash\nMODELS=/models\nexport NAME='my lora'\n\
            python cache_latents.py --vae $MODELS/vae\n\
            accelerate launch --num_cpu_threads_per_process 1 sd-scripts/flux_train_network.py \\\n  \
            --pretrained_model_name_or_path ${MODELS}/flux1-dev.safetensors --cache_latents \\\n  \
            --network_args 'a=1' \"b=2\" --output_name \"$NAME\" --lr-scheduler=constant # last\n";
        let TrainingCommand { program, flags } = find(script).unwrap().unwrap();
        assert_eq!(program, "flux_train_network.py");
        let expected = json!({
            "pretrained_model_name_or_path": "/models/flux1-dev.safetensors", "cache_latents": true,
            "network_args": ["a=1", "b=2"], "output_name": "my lora", "lr_scheduler": "constant",
        });
        assert_eq!(Value::Object(flags), expected);
    }

    #[test]
    fn what_only_a_shell_knows_is_refused() {
        let refused = |script: &str, why: &str| {
            let said = find(script).unwrap().err().unwrap();
            assert!(said.contains(why), "{said}");
        };
        refused("python train.py --seed $RANDOM\n", "$RANDOM");
        refused("python train.py --name 'a\n", "quote");
        refused("python train.py --seed 1\npython train.py --seed 2\n", "two training commands");
        refused("python train.py go --seed 1\n", "`go` belongs to no flag");
        assert!(find("echo hello\n").is_none());
    }
}
