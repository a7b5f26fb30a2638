//! Where everything stands on the screen.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use trellis_client::DaemonInfo;
use unicode_width::UnicodeWidthStr;

use super::app::App;
use super::guests::{self, Order, percent, rate};
use super::rates::Rates;
use super::samples::Sample;
use crate::cli::output::{self, escaped_line};
use crate::cli::status::{loading, memory};
use crate::cli::table::{Align, Table, cut};

/// Lines of a screen that has room for empty ones.
const N_LINES_ROOMY: u16 = 16;

/// Loads that are shown.
const N_LOADS_MAX: usize = 2;

/// What stands out, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Palette {
    head: Style,
    alarm: Style,
    selected: Style,
}

impl Palette {
    /// Without colours: <https://no-color.org>.
    pub(super) const PLAIN: Self = Self {
        head: Style::new().add_modifier(Modifier::BOLD),
        alarm: Style::new().add_modifier(Modifier::BOLD),
        selected: Style::new().add_modifier(Modifier::REVERSED),
    };

    /// With colours, unless the environment says that there are to be none.
    pub(super) fn of_environment() -> Self {
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if is_plain { Self::PLAIN } else { Self { alarm: Self::PLAIN.alarm.fg(Color::Red), ..Self::PLAIN } }
    }
}

/// A part of the screen that is filled from top to bottom.
struct Page<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    /// Lines that are filled.
    n_filled: u16,
}

impl Page<'_> {
    fn n_cells(&self) -> usize {
        self.area.width.into()
    }

    fn n_left(&self) -> usize {
        self.area.height.saturating_sub(self.n_filled).into()
    }

    /// A line of text of others.
    fn line(&mut self, text: &str, style: Style) {
        let text = cut(&escaped_line(text), self.n_cells()).into_owned();
        self.cells(&[(0, text)], style);
    }

    /// A line of texts that begin after so many cells each.
    fn cells(&mut self, cells: &[(usize, String)], style: Style) {
        if self.n_left() == 0 {
            return;
        }
        let Rect { x, width, .. } = self.area;
        let y = self.area.y + self.n_filled;
        self.buffer.set_style(Rect { y, height: 1, ..self.area }, style);
        for (start, text) in cells {
            let start = u16::try_from(*start).unwrap_or(u16::MAX).min(width);
            self.buffer.set_stringn(x + start, y, text, (width - start).into(), style);
        }
        self.n_filled += 1;
    }

    fn skip(&mut self) {
        self.n_filled = self.n_filled.saturating_add(1).min(self.area.height);
    }

    /// The head of a table, and these of its rows.
    fn table<const N: usize>(
        &mut self,
        table: &Table<N>,
        rows: std::ops::Range<usize>,
        palette: Palette,
        selected: Option<usize>,
    ) {
        let places = table.places(self.n_cells());
        for row in std::iter::once(None).chain(rows.map(Some)) {
            let cells: Vec<_> = places.iter().map(|&place| (place.start, table.cell(row, place))).collect();
            let style = match row {
                None => palette.head,
                Some(_) if row == selected => palette.selected,
                Some(_) => Style::new(),
            };
            self.cells(&cells, style);
        }
    }
}

/// Draws a frame of the live screen.
pub(super) fn draw(app: &mut App, palette: Palette, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let above = Rect { height: area.height - 1, ..area };
    let mut page = Page { buffer: &mut *buffer, area: above, n_filled: 0 };
    let is_roomy = area.height >= N_LINES_ROOMY;
    // Most of the screen is for guests.
    let n_devices_max = usize::from(area.height / 3).max(1);
    upper(app, palette, is_roomy, n_devices_max, &mut page);
    app.scroll(page.n_left().saturating_sub(1));
    lower(app, palette, &mut page, true);
    let last = Rect { y: area.bottom() - 1, height: 1, ..area };
    bottom(app, palette, &mut Page { buffer, area: last, n_filled: 0 });
}

/// A frame as text, in lines of so many cells, with all guests.
pub(super) fn text(app: &mut App, n_cells: usize) -> String {
    let (n_guests, n_devices) =
        app.sample.as_ref().map_or((0, 0), |sample| (sample.guests.len(), sample.daemon.devices.len()));
    // The heads of both tables, what stands above them and between them.
    let n_lines = n_guests + n_devices + N_LOADS_MAX + 8;
    let as_cells = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    let area = Rect::new(0, 0, as_cells(n_cells), as_cells(n_lines));
    let mut buffer = Buffer::empty(area);
    let mut page = Page { buffer: &mut buffer, area, n_filled: 0 };
    upper(app, Palette::PLAIN, true, n_devices, &mut page);
    app.scroll(n_guests.max(1));
    lower(app, Palette::PLAIN, &mut page, false);
    lines(&buffer).join("\n").trim_end().to_owned()
}

/// The lines of a frame.
pub(super) fn lines(buffer: &Buffer) -> Vec<String> {
    let Rect { x, y, width, height } = buffer.area;
    let line = |row: u16| {
        let (mut line, mut column) = (String::new(), 0);
        while column < width {
            let symbol = buffer[(x + column, y + row)].symbol();
            line.push_str(symbol);
            // What takes two cells is followed by one that holds nothing.
            column += u16::try_from(symbol.width()).unwrap_or(1).max(1);
        }
        line.trim_end().to_owned()
    };
    (0..height).map(line).collect()
}

/// The daemon and its devices.
fn upper(app: &App, palette: Palette, is_roomy: bool, n_devices_max: usize, page: &mut Page<'_>) {
    let Some(Sample { daemon, guests }) = &app.sample else {
        page.line("trellis top", palette.head);
        page.line(app.trouble.as_deref().unwrap_or("asking the daemon"), palette.alarm);
        return;
    };
    page.line(&title(daemon, guests.len()), palette.head);
    let failure = daemon.failure.as_ref().map(|failure| format!("FAILED: {failure}"));
    for alarm in app.trouble.iter().chain(&failure) {
        page.line(alarm, palette.alarm);
    }
    for load in daemon.loading.iter().take(N_LOADS_MAX) {
        page.line(&loading(load), Style::new());
    }
    if is_roomy {
        page.skip();
    }
    page.table(&devices(daemon, &app.rates), 0..daemon.devices.len().min(n_devices_max), palette, None);
    if is_roomy {
        page.skip();
    }
}

/// `trellis 0.1.0  up 3 min 4 s  5 guests, 2 shown  4 sessions  212 MB  DRAINING`
fn title(daemon: &DaemonInfo, n_shown: usize) -> String {
    let counted = |n: u64, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let mut guests = counted(daemon.n_guests, "guest");
    if daemon.n_guests != n_shown as u64 {
        guests += &format!(", {n_shown} shown");
    }
    let parts = [
        daemon.build.clone(),
        format!("up {}", output::duration_ms(daemon.uptime_ms)),
        guests,
        counted(daemon.n_sessions, "session"),
        output::bytes(daemon.resident_bytes),
    ];
    let state = daemon.state.as_ref().filter(|state| *state != "ready").map(|state| state.to_uppercase());
    parts.into_iter().chain(state).collect::<Vec<_>>().join("  ")
}

fn devices(daemon: &DaemonInfo, rates: &Rates) -> Table<8> {
    let mut table = Table::new([
        ("DEVICE", Align::Left),
        ("MEMORY", Align::Left),
        ("BUSY", Align::Right),
        ("ROWS", Align::Right),
        ("STEP", Align::Right),
        ("QUEUE", Align::Right),
        ("TOK/S", Align::Right),
        ("MODELS", Align::Left),
    ]);
    table.squeeze("MODELS", 6);
    table.spare(&["MEMORY", "MODELS", "BUSY", "ROWS", "STEP"]);
    let or_dash = |shown: Option<String>| shown.unwrap_or_else(|| "-".to_owned());
    for device in &daemon.devices {
        let of_device = rates.device(&device.name);
        table.push([
            device.name.clone(),
            or_dash(memory(device)),
            percent(of_device.busy),
            or_dash(of_device.steps.map(|steps| rate(steps.n_rows))),
            or_dash(of_device.steps.map(|steps| format!("{} ms", rate(steps.ms)))),
            or_dash(device.n_contexts_waiting.map(|n| n.to_string())),
            rate(of_device.tokens_per_s),
            if device.models.is_empty() { "none".to_owned() } else { device.models.join(", ") },
        ]);
    }
    table
}

/// The guests, as far as there is room.
fn lower(app: &App, palette: Palette, page: &mut Page<'_>, is_live: bool) {
    let Some(Sample { guests, .. }) = &app.sample else { return };
    if guests.is_empty() {
        return page.line("no guests", Style::new());
    }
    let table = guests::table(guests, &app.rates, |uid| app.name(uid));
    let end = (app.first + app.n_shown).min(guests.len());
    page.table(&table, app.first..end, palette, is_live.then(|| app.place()));
}

/// What is asked, or else what was said, or else which keys there are and which guests are shown.
fn bottom(app: &App, palette: Palette, page: &mut Page<'_>) {
    if let Some(guest_id) = app.asked {
        return page
            .line(&format!("stop guest {guest_id}? y stops it, any other key does not"), palette.alarm);
    }
    if let Some(notice) = app.notice() {
        return page.line(notice, palette.head);
    }
    let n_guests = app.sample.as_ref().map_or(0, |sample| sample.guests.len());
    let range = match n_guests > app.n_shown {
        true => format!("{}-{} of {n_guests}  ", app.first + 1, app.first + app.n_shown),
        false => String::new(),
    };
    let mut cells = Vec::new();
    let mut start = 0;
    for part in std::iter::once(range).chain(keys(app.order)) {
        let n_cells = part.width();
        cells.push((start, part));
        start += n_cells;
    }
    page.cells(&cells, Style::new());
}

/// The keys; those of the order that holds in brackets.
fn keys(order: Order) -> impl Iterator<Item = String> {
    let orders = Order::ALL.into_iter().map(move |(key, name, by)| match by == order {
        true => format!("[{key} {name}] "),
        false => format!(" {key} {name}  "),
    });
    orders.chain(["s stop  q leave".to_owned()])
}
