//! A page that opens in any browser from the disk: its style is inside, and it asks for nothing else.

use super::format::escaped;

/// Colours of pages and of images that stand alone, by light and dark.
pub const COLOURS: &str = include_str!("colours.css");

/// How the title of every page ends, by which hearth knows its own.
pub const MARK: &str = " – hearth</title>";

/// A whole page under a title; one that `refreshes` is read again by the browser after so many seconds.
pub fn document(title: &str, refreshes: Option<u64>, body: &str) -> String {
    let title = escaped(title);
    let refresh = |secs| format!("<meta http-equiv=\"refresh\" content=\"{secs}\">");
    let refresh = refreshes.map(refresh).unwrap_or_default();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">{refresh}\
         <title>{title}{MARK}\n<style>\n{COLOURS}{}</style></head>\n<body>\n\
         <h1>{title}</h1>\n{body}</body></html>\n",
        include_str!("style.css"),
    )
}
