//! Frames as a terminal would show them, and keys.

use std::convert::Infallible;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;
use trellis_client::{DaemonInfo, DeviceInfo, GuestAmounts, GuestInfo, GuestUsage, LoadingInfo};

use super::app::{App, Wish};
use super::guests::Order;
use super::samples::{News, Sample};
use super::view::{self, Palette};

/// What a component may be called: wide letters, commands for a terminal, and what turns the direction of a text.
const NAME: &str = "世界\u{1b}[2J\u{7}\u{9b}1m\n\r\t\u{202e}evil@0123456789ab";

fn guest(guest_id: u64) -> GuestInfo {
    // Of the others it has none.
    let limits = GuestAmounts { cpu_ms: 10_000, n_pages: 1000, ..GuestAmounts::default() };
    let used = GuestAmounts { cpu_ms: 100 * guest_id, n_pages: 10 * guest_id, ..GuestAmounts::default() };
    GuestInfo {
        guest_id,
        uid: 7,
        program: if guest_id == 2 { NAME.to_owned() } else { format!("chat-{guest_id}@0123456789ab") },
        state: "waiting".to_owned(),
        models: vec!["tiny".to_owned()],
        n_pages: 10 * guest_id,
        n_prompt_tokens: if guest_id == 3 { 800 } else { 0 },
        n_prompt_tokens_left: if guest_id == 3 { 600 } else { 0 },
        elapsed_ms: 1000,
        usage: GuestUsage {
            n_tokens: 100,
            n_tokens_guessed: 4,
            n_tokens_guessed_right: 3,
            ..GuestUsage::default()
        },
        used: Some(used),
        limits: Some(limits),
        ..GuestInfo::default()
    }
}

fn sample(n_guests: u64) -> Sample {
    let device = DeviceInfo {
        name: "cpu".to_owned(),
        models: vec!["tiny".to_owned(), "draft".to_owned()],
        open_ms: 2000,
        busy_ms: 1000,
        n_steps: 100,
        n_rows: 250,
        n_tokens: 300,
        n_contexts_waiting: Some(4),
        memory_bytes: Some(4_200_000_000),
        memory_bytes_used: Some(31_000_000),
    };
    let daemon = DaemonInfo {
        build: "trellis 0.1.0".to_owned(),
        pid: 1,
        uptime_ms: 2000,
        devices: vec![device],
        n_guests,
        n_sessions: 2,
        resident_bytes: 212_000_000,
        state: Some("ready".to_owned()),
        ..DaemonInfo::default()
    };
    Sample { daemon, guests: (1..=n_guests).map(guest).collect() }
}

/// The answer that comes a second later, in which each guest got as many tokens as its number.
fn later(n_guests: u64) -> Sample {
    let mut later = sample(n_guests);
    later.daemon.uptime_ms += 1000;
    for guest in &mut later.guests {
        guest.elapsed_ms += 1000;
        guest.usage.n_tokens += guest.guest_id;
    }
    let device = &mut later.daemon.devices[0];
    (device.open_ms, device.busy_ms) = (3000, 1800);
    (device.n_steps, device.n_rows, device.n_tokens) = (164, 506, 520);
    later
}

fn hears(app: &mut App, sample: Sample) {
    app.hear(News::Sample(Box::new(sample)));
}

fn app(n_guests: u64) -> App {
    let mut app = App::new(|uid| format!("user{uid}"));
    hears(&mut app, sample(n_guests));
    hears(&mut app, later(n_guests));
    app
}

fn terminal(width: u16, height: u16) -> Terminal<TestBackend> {
    match Terminal::new(TestBackend::new(width, height)) {
        Ok(terminal) => terminal,
        Err(never) => match never {},
    }
}

fn drawn(app: &mut App, terminal: &mut Terminal<TestBackend>) -> Vec<String> {
    let drawn: Result<_, Infallible> =
        terminal.draw(|frame| view::draw(app, Palette::PLAIN, frame.area(), frame.buffer_mut()));
    drawn.expect("it cannot fail");
    let buffer = terminal.backend().buffer();
    let symbols = buffer.content().iter().flat_map(|cell| cell.symbol().chars());
    let is_obeyed =
        |c: &char| c.is_control() || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}');
    assert_eq!(symbols.clone().find(is_obeyed), None);
    view::lines(buffer)
}

fn frame(app: &mut App, width: u16, height: u16) -> Vec<String> {
    drawn(app, &mut terminal(width, height))
}

fn press(app: &mut App, code: KeyCode) -> Wish {
    app.press(KeyEvent::new(code, KeyModifiers::NONE))
}

/// The first words of lines.
fn numbers(lines: &[String]) -> Vec<u64> {
    lines.iter().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
}

#[test]
fn a_usual_terminal_shows_the_daemon_its_devices_and_guests() {
    let lines = frame(&mut app(3), 80, 24);
    let expected = [
        "trellis 0.1.0  up 3.0 s  3 guests  2 sessions  212 MB",
        "",
        "DEVICE  MEMORY             BUSY  ROWS   STEP  QUEUE  TOK/S  MODELS",
        "cpu     31.0 MB of 4.2 GB   80%   4.0  12 ms      4    220  tiny, draft",
        "",
    ];
    assert_eq!(lines[..5], expected);
    let text = lines.join("\n");
    for part in
        ["GUEST", "PROGRAM", "MODEL", "STATE", "TOK/S", "PAGES", "LEFT", "prefill 25%", "chat-1@012345"]
    {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert_eq!(numbers(&lines[6..9]), [3, 2, 1], "most tokens first: {text}");
    assert!(lines[8].ends_with("99% cpu_ms"), "{text}");
    assert_eq!(lines[23], "[t tokens/s]  p pages   c cpu   i id  s stop  q leave");
}

#[test]
fn a_small_terminal_has_what_matters_most_and_a_large_one_everything() {
    let lines = frame(&mut app(30), 40, 10);
    let text = lines.join("\n");
    assert!(lines[0].starts_with("trellis 0.1.0") && lines[1].starts_with("DEVICE"), "{text}");
    assert!(lines[3].starts_with("GUEST") && lines[3].contains("TOK/S"), "{text}");
    assert_eq!(numbers(&lines[4..9]), [30, 29, 28, 27, 26], "{text}");
    assert!(lines[9].starts_with("1-5 of 30"), "{text}");

    let lines = frame(&mut app(30), 200, 50);
    let text = lines.join("\n");
    for part in ["TOKENS", "CPU", "GUESSES", "75%"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert_eq!(numbers(&lines[6..36]).len(), 30, "{text}");
    let evil = lines.iter().find(|line| line.contains("世界")).expect("it is listed");
    assert!(evil.contains("世界\\u{1b}[2J") && !evil.contains('\u{1b}'), "{evil}");
    // Columns stand where they would without it.
    let column = |line: &str| {
        let before = line.split("tiny").next().expect("a part");
        unicode_width::UnicodeWidthStr::width(before)
    };
    let guests = &lines[6..36];
    assert!(guests.iter().all(|line| column(line) == column(evil)), "{text}");
}

#[test]
fn no_size_is_too_small() {
    for (width, height) in [(1, 1), (2, 3), (7, 4), (80, 1), (80, 2), (80, 5), (3, 50)] {
        for n_guests in [0, 1, 30] {
            assert_eq!(frame(&mut app(n_guests), width, height).len(), usize::from(height));
        }
    }
}

#[test]
fn a_terminal_may_change_its_size() {
    let (mut app, mut terminal) = (app(30), terminal(80, 24));
    assert!(drawn(&mut app, &mut terminal)[23].starts_with("1-17 of 30"));
    press(&mut app, KeyCode::End);
    let lines = drawn(&mut app, &mut terminal);
    assert!(lines[23].starts_with("14-30 of 30") && lines[22].starts_with("    1"), "{lines:?}");
    terminal.backend_mut().resize(120, 12);
    let lines = drawn(&mut app, &mut terminal);
    assert!(lines[11].starts_with("24-30 of 30") && lines[10].starts_with("    1"), "{lines:?}");
    terminal.backend_mut().resize(80, 60);
    assert_eq!(numbers(&drawn(&mut app, &mut terminal)[6..36]).len(), 30);
}

#[test]
fn keys_sort_and_the_selected_guest_stays_selected() {
    let mut app = app(3);
    let order = |app: &mut App| numbers(&frame(app, 80, 24)[6..9]);
    press(&mut app, KeyCode::Down);
    assert_eq!(app.place(), 1);
    for (key, by, expected) in [
        ('i', Order::Number, [1, 2, 3]),
        ('p', Order::Pages, [3, 2, 1]),
        ('c', Order::Cpu, [1, 2, 3]),
        ('t', Order::TokensPerS, [3, 2, 1]),
    ] {
        press(&mut app, KeyCode::Char(key));
        assert_eq!((app.order, order(&mut app)), (by, expected.to_vec()));
        assert_eq!(app.place(), 1, "guest 2 stands in the middle");
    }
    // The selected one has ended: the one that has its place now is selected.
    let mut fewer = later(3);
    fewer.guests.retain(|guest| guest.guest_id != 2);
    hears(&mut app, fewer);
    assert_eq!(press(&mut app, KeyCode::Char('s')), Wish::Nothing);
    assert!(app.asked.is_some_and(|id| id != 2), "{:?}", app.asked);
}

#[test]
fn keys_scroll_by_guests_and_pages() {
    let mut app = app(30);
    frame(&mut app, 80, 24);
    for (code, place) in [
        (KeyCode::Up, 0),
        (KeyCode::Down, 1),
        (KeyCode::PageDown, 18),
        (KeyCode::PageDown, 29),
        (KeyCode::Down, 29),
        (KeyCode::PageUp, 12),
        (KeyCode::Home, 0),
        (KeyCode::End, 29),
    ] {
        press(&mut app, code);
        assert_eq!(app.place(), place, "{code:?}");
        let lines = frame(&mut app, 80, 24);
        let selected = (30 - place).to_string();
        assert!(lines.iter().any(|line| line.trim_start().starts_with(&selected)), "{code:?}: {lines:?}");
    }
}

#[test]
fn a_guest_is_stopped_when_that_is_confirmed() {
    let mut app = app(2);
    for key in ['s', 'k'] {
        assert_eq!(press(&mut app, KeyCode::Char(key)), Wish::Nothing);
        let lines = frame(&mut app, 80, 24);
        assert_eq!(lines[23], "stop guest 2? y stops it, any other key does not");
        // What would leave otherwise.
        assert_eq!(press(&mut app, KeyCode::Char('q')), Wish::Nothing);
        press(&mut app, KeyCode::Char(key));
        assert_eq!(press(&mut app, KeyCode::Char('y')), Wish::Stop(2));
    }
    app.hear(News::Told("guest 2 was not stopped: \u{1b}[2J".to_owned()));
    assert_eq!(frame(&mut app, 80, 24)[23], "guest 2 was not stopped: \\u{1b}[2J");
    for _ in 0..10 {
        hears(&mut app, later(2));
    }
    assert!(frame(&mut app, 80, 24)[23].ends_with("q leave"), "it was shown for long enough");
    // It ends before the answer is given.
    press(&mut app, KeyCode::End);
    press(&mut app, KeyCode::Char('s'));
    assert_eq!(app.asked, Some(2));
    hears(&mut app, later(1));
    assert_eq!(press(&mut app, KeyCode::Char('y')), Wish::Nothing);
    // There is nothing to stop.
    hears(&mut app, later(0));
    press(&mut app, KeyCode::Char('s'));
    assert_eq!(press(&mut app, KeyCode::Char('y')), Wish::Nothing);
}

#[test]
fn all_ways_out_lead_out() {
    let mut app = app(1);
    assert_eq!(press(&mut app, KeyCode::Char('q')), Wish::Leave);
    assert_eq!(press(&mut app, KeyCode::Esc), Wish::Leave);
    press(&mut app, KeyCode::Char('s'));
    assert_eq!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Wish::Leave);
}

#[test]
fn what_is_wrong_with_the_daemon_is_said() {
    let mut app = App::new(|uid| uid.to_string());
    assert_eq!(frame(&mut app, 80, 24)[1], "asking the daemon");
    let mut failing = sample(1);
    failing.daemon.failure = Some("cpu: \u{1b}[2J".to_owned());
    failing.daemon.state = Some("draining".to_owned());
    failing.daemon.n_guests = 5;
    failing.daemon.loading = vec![LoadingInfo { model: "big".to_owned(), done_bytes: 34, total_bytes: 100 }];
    hears(&mut app, failing);
    let lines = frame(&mut app, 80, 24);
    assert!(lines[0].contains("5 guests, 1 shown") && lines[0].ends_with("DRAINING"), "{lines:?}");
    assert_eq!(lines[1..3], ["FAILED: cpu: \\u{1b}[2J", "loading big: 34% of 100 B"]);
    app.hear(News::Silent);
    let lines = frame(&mut app, 80, 24);
    assert!(lines[1].contains("does not answer") && lines.join("").contains("chat-1"), "{lines:?}");
    app.hear(News::Gone("the daemon closed it".to_owned()));
    let lines = frame(&mut app, 80, 24);
    assert_eq!(lines[1], "the daemon is gone, and looked for: the daemon closed it");
    assert!(!lines.join("").contains("chat-1"), "{lines:?}");
    hears(&mut app, sample(1));
    assert!(frame(&mut app, 80, 24).join("").contains("chat-1"));
}

#[test]
fn one_frame_as_text_has_all_guests_and_no_keys() {
    let text = view::text(&mut app(100), 80);
    assert_eq!(numbers(&text.lines().map(str::to_owned).collect::<Vec<_>>()).len(), 100);
    assert!(!text.contains("q leave") && !text.contains('\u{1b}'), "{text}");
    assert!(text.lines().all(|line| unicode_width::UnicodeWidthStr::width(line) <= 80), "{text}");
    assert!(view::text(&mut app(0), 80).ends_with("no guests"));
}

#[test]
fn without_colours_there_are_none() {
    let (mut app, mut terminal) = (app(2), terminal(80, 24));
    app.hear(News::Silent);
    drawn(&mut app, &mut terminal);
    let cells = terminal.backend().buffer().content();
    assert!(cells.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
}
