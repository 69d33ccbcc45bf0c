//! The dashboard as it is drawn, without a terminal.

use std::fs;
use std::path::Path;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::draw::{Glyphs, draw};
use super::keys::KeyOutcome;
use super::view::{KeyMode, RunView};

const PLAIN: Glyphs = Glyphs { is_unicode: false, is_coloured: false };
const FULL: Glyphs = Glyphs { is_unicode: true, is_coloured: true };

/// A run of forty steps with everything that panels show.
fn run(folder: &Path) -> RunView {
    let mut lines = vec![
        r#"{"event":"phase","name":"open","time":1.0}"#.to_owned(),
        r#"{"event":"begin","version":"0.1.0","format":2,"base":"b","engine":"cpu, 8 threads","from_step":0,"steps":100,"unit":"image","samples":12,"held_out":2,"layers":24,"parameters":9000,"samples_per_step":1,"phases":[{"name":"train 64x64","peak_bytes":2147483648}],"settings":"1 at once","step_secs":0.5,"times":{},"limit_bytes":4294967296,"time":2.0}"#.to_owned(),
        r#"{"event":"memory","phase":"train 64x64","planned_bytes":2147483648,"peak_bytes":1073741824}"#.to_owned(),
        r#"{"event":"telemetry","step":1,"secs":0.0,"duty":1.0,"memory":{"held":1073741824,"left":3221225472},"memory_stall":null,"pressure_level":null,"temperature":{"sensor":"cpu","celsius":71.0,"limit":95.0},"throttled":null,"watts":40.0,"on_battery":null}"#.to_owned(),
        r#"{"event":"telemetry","step":9,"secs":10.0,"duty":1.0,"memory":{"held":1073741824,"left":3221225472},"memory_stall":null,"pressure_level":null,"temperature":{"sensor":"cpu","celsius":72.0,"limit":95.0},"throttled":null,"watts":40.0,"on_battery":null}"#.to_owned(),
    ];
    for step in 1..=40 {
        let (loss, time) = (1.0 / f64::from(step), 2.0 + 0.5 * f64::from(step));
        lines.push(format!(
            r#"{{"event":"step","step":{step},"loss":{loss},"grad_norm":0.25,"learning_rate":1e-4,"secs":0.5,"wait_secs":0.0,"peak_bytes":1000,"time":{time}}}"#
        ));
    }
    lines.push(r#"{"event":"validation","step":40,"loss":0.5,"time":22.0}"#.into());
    lines.push(r#"{"event":"text_sample","step":40,"prompt":"a\u001b[2J","text":"b","seed":1,"time":22.0}"#.into());
    lines.push(r#"{"event":"ranks","step":40,"ranks":[{"node":"mac","device":"gpu","samples":9,"compute_secs":0.5,"wait_secs":0.0,"exchange_secs":0.1},{"node":"spark","device":"cuda:0","samples":15,"compute_secs":0.25,"wait_secs":0.25,"exchange_secs":0.1,"celsius":64.0}]}"#.into());
    fs::write(folder.join("events.jsonl"), lines.join("\n") + "\n").unwrap();
    let mut view = RunView::new(folder);
    assert!(view.update().unwrap());
    view
}

fn drawn(view: &RunView, [width, height]: [u16; 2], glyphs: Glyphs) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view, glyphs)).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(row).collect()
}

#[test]
fn everything_is_there_in_80_columns_and_24_rows_without_unicode() {
    let folder = tempfile::tempdir().unwrap();
    let view = run(folder.path());
    let rows = drawn(&view, [80, 24], PLAIN);
    let text = rows.join("\n");
    assert!(text.is_ascii(), "{text}");
    for part in [
        "killed",
        "cpu, 8 threads",
        "40/100 steps",
        " loss ",
        "smoothed",
        "0.5000 held out",
        "grad 0.25",
        " seconds per step ",
        "2.0 steps/s",
        "planned 2.0 steps/s",
        "72 of 95  C",
        "40 W  0.4 kJ",
        "full pace",
        "1.0 GiB held of 4.0 GiB",
        "train 64x64 ",
        "limit 4.0 GiB",
        "spark",
        "step 40: held-out loss",
        "s sample",
        "? help",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(text.contains("\\u{1b}[2J") && !text.contains('\x1b'), "{text}");
    // Both curves: dots of steps and stars of the mean.
    assert!(rows[3..9].concat().matches('*').count() > 5, "{text}");
}

#[test]
fn one_step_that_was_held_up_does_not_flatten_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = run(folder.path());
    let mut slow = view.run.history.steps[39].clone();
    for step in 41..=200 {
        (slow.step, slow.secs) = (step, if step == 50 { 60.0 } else { 0.5 + 0.001 * step as f64 });
        view.run.history.steps.push(slow.clone());
    }
    let text = drawn(&view, [80, 24], PLAIN).join("\n");
    assert!(text.contains("0.699") && !text.contains("60.0"), "{text}");
}

#[test]
fn a_few_first_losses_do_not_flatten_the_curve_and_held_out_ones_are_all_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = run(folder.path());
    let history = &mut view.run.history;
    let mut later = history.steps[39].clone();
    history.steps.clear();
    history.validations = vec![(0, 1.5)];
    for step in 1..=400 {
        (later.step, later.loss) = (step, if step <= 3 { 500.0 } else { 1.0 });
        history.steps.push(later.clone());
    }
    let text = drawn(&view, [80, 24], PLAIN).join("\n");
    assert!(text.contains("|  1.5000 o") && !text.contains("500.0"), "{text}");
}

#[test]
fn every_size_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = run(folder.path());
    for mode in
        [KeyMode::Commands, KeyMode::Help, KeyMode::Prompt("é".into()), KeyMode::ConfirmStop]
    {
        view.mode = mode;
        for width in [1, 2, 10, 20, 40, 63, 64, 80, 120, 300] {
            for height in [1, 2, 3, 5, 8, 15, 16, 24, 40, 100] {
                drawn(&view, [width, height], FULL);
            }
        }
    }
    let empty = tempfile::tempdir().unwrap();
    let text = drawn(&RunView::new(empty.path()), [80, 24], FULL).join("\n");
    assert!(text.contains("waiting for the run"), "{text}");
}

#[test]
fn keys_ask_and_leave() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = run(folder.path());
    let mut press = |code| view.press(KeyEvent::new(code, KeyModifiers::NONE));
    assert_eq!(press(KeyCode::Char('q')), KeyOutcome::Leave);
    assert_eq!(press(KeyCode::Char('x')), KeyOutcome::Stay);
    assert_eq!(press(KeyCode::Char('q')), KeyOutcome::Stay, "it was not a yes");
    for key in "nq?x".chars().map(KeyCode::Char).chain([KeyCode::Backspace]) {
        assert_eq!(press(key), KeyOutcome::Stay);
    }
    assert_eq!(view.mode, KeyMode::Prompt("q?".into()));
    // Nobody works on this run.
    view.press(KeyEvent::new(KeyCode::Enter, KeyModifiers::NONE));
    assert!(view.log.back().unwrap().text.contains("no program works"));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(view.press(interrupt), KeyOutcome::Interrupt);
}
