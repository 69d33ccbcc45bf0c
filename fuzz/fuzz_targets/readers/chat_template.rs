//! Any text as a chat template, run apart as `hearth` runs it: an answer, or an error, and soon. The program to run is
//! in HEARTH; without it there is nothing to test.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Once;

use trainer::text::chat::{ChatTemplate, Message, render_apart};

static PROGRAM: Once = Once::new();

pub fn read(bytes: &[u8]) {
    let Ok(source) = str::from_utf8(bytes) else { return };
    PROGRAM.call_once(|| {
        render_apart(std::env::var_os("HEARTH").expect("HEARTH is the program").into());
    });
    let template = ChatTemplate::of_model(source, BTreeMap::new(), Path::new("x"));
    let message = |role: &str| Message::new(role, "Ofen");
    let said = template.conversation(&[message("user"), message("assistant")]);
    if let Ok(conversation) = said {
        assert!(
            conversation.answers.iter().all(|range| conversation.text.get(range.clone()).is_some())
        );
    }
}
