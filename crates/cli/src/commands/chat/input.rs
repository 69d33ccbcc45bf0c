//! What somebody types to a model: a message, or a command that begins with a slash.

use std::io::{self, BufRead};
use std::path::PathBuf;

/// Begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// One input.
#[derive(Debug, PartialEq, Eq)]
pub enum ChatInput {
    Message(String),
    Help,
    /// What a model is told about its part; empty to say nothing.
    System(String),
    Retry,
    Reset,
    Info,
    Save(PathBuf),
    Load(PathBuf),
    End,
    /// A command that there is not, or one that lacks its file.
    Wrong(String),
}

/// What `/help` prints.
pub const HELP: &str = "\
/system TEXT   tell the model about its part, from here on; without TEXT nothing is said
/retry         answer the last question again, with another seed
/reset         begin anew; the system message stays
/info          how long the conversation is, and how fast the last answer came
/save FILE     add the conversation to a .jsonl file, a line that `hearth train --text` learns from
/load FILE     go on with the last conversation of such a file
/bye           end; so does Ctrl-D
\"\"\"            begins and ends a message of several lines
Ctrl-C         ends an answer; between answers the program
";

/// The next input; empty lines are passed over.
pub fn read(lines: &mut dyn BufRead) -> io::Result<ChatInput> {
    loop {
        let Some(line) = read_line(lines)? else { return Ok(ChatInput::End) };
        let typed = line.trim();
        if let Some(command) = typed.strip_prefix('/') {
            return Ok(parse(command));
        }
        let message = match typed.strip_prefix(QUOTES) {
            Some(first) => read_block(first, lines)?,
            None => typed.to_owned(),
        };
        if !message.is_empty() {
            return Ok(ChatInput::Message(message));
        }
    }
}

/// Bytes that are no text become question marks; none at the end.
fn read_line(lines: &mut dyn BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let n = lines.read_until(b'\n', &mut line)?;
    Ok((n > 0).then(|| String::from_utf8_lossy(&line).into_owned()))
}

fn read_block(first: &str, lines: &mut dyn BufRead) -> io::Result<String> {
    let mut text = first.to_owned();
    while !text.trim_end().ends_with(QUOTES) {
        let Some(line) = read_line(lines)? else { break };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&line);
    }
    let text = text.trim_end();
    Ok(text.strip_suffix(QUOTES).unwrap_or(text).trim().to_owned())
}

fn parse(command: &str) -> ChatInput {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    let rest = rest.trim();
    let file = |make: fn(PathBuf) -> ChatInput| match rest {
        "" => ChatInput::Wrong(format!("/{name} wants the name of a file")),
        path => make(path.into()),
    };
    match name {
        "help" | "?" => ChatInput::Help,
        "system" => ChatInput::System(rest.to_owned()),
        "retry" => ChatInput::Retry,
        "reset" | "clear" => ChatInput::Reset,
        "info" => ChatInput::Info,
        "save" => file(ChatInput::Save),
        "load" => file(ChatInput::Load),
        "bye" | "exit" | "quit" => ChatInput::End,
        _ => ChatInput::Wrong(format!("there is no command /{name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(typed: &[u8]) -> Vec<ChatInput> {
        let mut lines = typed;
        std::iter::from_fn(|| match read(&mut lines).unwrap() {
            ChatInput::End => None,
            input => Some(input),
        })
        .collect()
    }

    fn message(text: &str) -> ChatInput {
        ChatInput::Message(text.into())
    }

    #[test]
    fn lines_are_messages_or_commands() {
        let typed =
            b"hello\n\n  \n\"\"\"\"\"\"\n /system be brief \n/save a b.jsonl\n/reset\nlast \xff";
        let expected = [
            message("hello"),
            ChatInput::System("be brief".into()),
            ChatInput::Save("a b.jsonl".into()),
            ChatInput::Reset,
            message("last \u{fffd}"),
        ];
        assert_eq!(inputs(typed), expected);
    }

    #[test]
    fn quotes_hold_several_lines() {
        let typed = b"\"\"\"one\n  two\n\n/bye\"\"\"\n\"\"\"\nthree\n\"\"\"\n\"\"\"four\"\"\"\n\"\"\"never closed\nfive";
        let expected = [
            message("one\n  two\n\n/bye"),
            message("three"),
            message("four"),
            message("never closed\nfive"),
        ];
        assert_eq!(inputs(typed), expected);
    }

    #[test]
    fn the_end_is_the_end() {
        for typed in ["", "/bye\nmore", "/quit"] {
            assert_eq!(inputs(typed.as_bytes()), []);
        }
    }

    #[test]
    fn what_is_no_command_is_said_so() {
        for (typed, says) in [("/sytem x", "no command /sytem"), ("/save", "/save wants the name")]
        {
            let [ChatInput::Wrong(said)] = &inputs(typed.as_bytes())[..] else { panic!("{typed}") };
            assert!(said.contains(says), "{said}");
        }
    }
}
