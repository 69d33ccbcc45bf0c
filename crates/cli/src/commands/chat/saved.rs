//! Conversations on disk: a line of JSON each, `{"messages": […]}`, which is also what models learn from.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trainer::TrainerError;
use trainer::text::Message;
use weights::write::write_whole;

use crate::failure::Failure;

/// The most bytes of a file that are read. Chosen: thousands of conversations.
const MOST_BYTES: u64 = 64 << 20;

/// A line of the file.
#[derive(Deserialize, Serialize)]
struct SavedConversation {
    messages: Vec<Message>,
}

/// The line that was written last: the same conversation replaces it.
#[derive(Default)]
pub struct LastSaved {
    path: PathBuf,
    line: String,
}

/// Adds a conversation to a file, which may not be there yet. Returns how many are in it.
pub fn save(path: &Path, messages: &[Message], last: &mut LastSaved) -> Result<usize, Failure> {
    let before = match read(path) {
        Err(Failure::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            String::new()
        }
        read => read?,
    };
    let mut lines: Vec<&str> = before.lines().collect();
    if last.path == path && lines.last() == Some(&&*last.line) {
        lines.pop();
    }
    let conversation = SavedConversation { messages: messages.to_vec() };
    let line = serde_json::to_string(&conversation).map_err(io::Error::from)?;
    lines.push(&line);
    write_whole(path, (lines.join("\n") + "\n").as_bytes())?;
    let n = lines.len();
    *last = LastSaved { path: path.into(), line };
    Ok(n)
}

/// The last conversation of a file.
pub fn load(path: &Path) -> Result<Vec<Message>, Failure> {
    let text = read(path)?;
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    match serde_json::from_str::<SavedConversation>(line) {
        Ok(saved) if !saved.messages.is_empty() => Ok(saved.messages),
        _ => Err(TrainerError::Request {
            problem: format!("the last line is no conversation: {}", path.display()),
            hint: "give a file that /save wrote, or one with {\"messages\": […]} in each line",
        }
        .into()),
    }
}

fn read(path: &Path) -> Result<String, Failure> {
    let failed = |error| Failure::Read { path: path.into(), error };
    let size = fs::metadata(path).map_err(failed)?;
    if !size.is_file() || size.len() > MOST_BYTES {
        return Err(failed(io::Error::other("not a file, or one of more than 64 MiB")));
    }
    fs::read_to_string(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_saved_once_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chats.jsonl");
        let mut messages = vec![Message::user("a\n\"b\""), Message::assistant("c")];
        let other = [Message::user("other")];
        assert_eq!(save(&path, &other, &mut LastSaved::default()).unwrap(), 1);
        let mut last = LastSaved::default();
        assert_eq!(save(&path, &messages, &mut last).unwrap(), 2);
        messages.push(Message::user("d"));
        assert_eq!(save(&path, &messages, &mut last).unwrap(), 2, "it has grown");
        assert_eq!(load(&path).unwrap(), messages);
        assert_eq!(save(&path, &other, &mut LastSaved::default()).unwrap(), 3);
        assert_eq!(save(&path, &messages, &mut last).unwrap(), 4, "another came between");
    }

    #[test]
    fn other_files_are_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        for text in ["", "no JSON", "{\"messages\": []}"] {
            fs::write(&path, text).unwrap();
            assert!(load(&path).is_err(), "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert!(load(&folder.path().join("none")).is_err());
        assert!(save(folder.path(), &[Message::user("a")], &mut LastSaved::default()).is_err());
    }
}
