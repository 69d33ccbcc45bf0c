//! An HTML page without external files: its style is inside.

use super::format::escaped;

/// Colours of pages and of images that stand alone, by light and dark.
pub const COLOURS: &str = include_str!("colours.css");

/// The end of every page's title, which marks it as written by hearth.
pub const MARK: &str = " – hearth</title>";

/// A whole page; with `refreshes`, the browser reloads it after so many seconds.
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
