//! What is shown, selected and asked: changed by what the daemon says and by keys.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustc_hash::FxHashMap;

use super::guests::Order;
use super::rates::Rates;
use super::samples::{News, Sample};

/// What a key asks of others than the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Leave,
    /// A guest is to be stopped.
    Stop(u64),
}

/// Answers of the daemon for which it is shown how something went.
const N_NOTICE_SAMPLES: u32 = 5;

pub(super) struct App {
    /// The daemon as it was last, its guests in order; nothing before its first answer.
    pub(super) sample: Option<Sample>,
    pub(super) rates: Rates,
    pub(super) order: Order,
    /// Why there is nothing new.
    pub(super) trouble: Option<String>,
    /// How something went that the user wanted, and for how many more answers that is shown.
    notice: Option<(String, u32)>,
    /// The guest that is stopped if the user says so.
    pub(super) asked: Option<u64>,
    /// The first guest on the screen.
    pub(super) first: usize,
    /// Guests that the screen has room for.
    pub(super) n_shown: usize,
    /// The guest that is selected; the first one until a key selects another.
    selected: Option<u64>,
    names: FxHashMap<u32, String>,
    name_of: fn(u32) -> String,
}

impl App {
    /// Nothing is known yet; `name_of` gives the names of users.
    pub(super) fn new(name_of: fn(u32) -> String) -> Self {
        Self {
            sample: None,
            rates: Rates::default(),
            order: Order::default(),
            trouble: None,
            notice: None,
            asked: None,
            first: 0,
            n_shown: 1,
            selected: None,
            names: FxHashMap::default(),
            name_of,
        }
    }

    /// Takes in what there is to show.
    pub(super) fn hear(&mut self, news: News) {
        match news {
            News::Sample(sample) => self.take(*sample),
            News::Silent => self.trouble = Some("the daemon does not answer; what follows is old".to_owned()),
            News::Gone(why) => {
                self.trouble = Some(format!("the daemon is gone, and looked for: {why}"));
                // Nothing of that is left.
                self.sample = None;
                (self.selected, self.asked) = (None, None);
            }
            News::Told(said) => self.notice = Some((said, N_NOTICE_SAMPLES)),
        }
    }

    fn take(&mut self, mut sample: Sample) {
        let place = self.place();
        self.rates = Rates::between(self.sample.as_ref(), &sample);
        self.order.sort(&mut sample.guests, &self.rates);
        for guest in &sample.guests {
            self.names.entry(guest.uid).or_insert_with(|| (self.name_of)(guest.uid));
        }
        let is_there = |id: u64| sample.guests.iter().any(|guest| guest.guest_id == id);
        self.asked = self.asked.filter(|&id| is_there(id));
        if self.selected.is_some_and(|id| !is_there(id)) {
            // Where one has gone, the one that follows it is selected.
            self.selected = guest_at(&sample, place);
        }
        self.notice = self.notice.take().and_then(|(said, n_left)| Some((said, n_left.checked_sub(1)?)));
        self.sample = Some(sample);
        self.trouble = None;
    }

    /// How something went that the user wanted.
    pub(super) fn notice(&self) -> Option<&str> {
        self.notice.as_ref().map(|(said, _)| said.as_str())
    }

    /// The name of a user with guests.
    pub(super) fn name(&self, uid: u32) -> String {
        self.names.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// Where the selected guest is among all.
    pub(super) fn place(&self) -> usize {
        let guests = self.sample.as_ref().map_or(&[][..], |sample| &sample.guests);
        guests.iter().position(|guest| Some(guest.guest_id) == self.selected).unwrap_or(0)
    }

    fn n_guests(&self) -> usize {
        self.sample.as_ref().map_or(0, |sample| sample.guests.len())
    }

    /// Selects the guest at this place, or the last.
    fn select(&mut self, place: usize) {
        self.selected = self.sample.as_ref().and_then(|sample| guest_at(sample, place));
    }

    fn sort_by(&mut self, order: Order) {
        self.order = order;
        if let Some(sample) = &mut self.sample {
            order.sort(&mut sample.guests, &self.rates);
        }
    }

    /// A key was pressed.
    pub(super) fn press(&mut self, key: KeyEvent) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Nothing;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Wish::Leave;
        }
        self.notice = None;
        if let Some(guest_id) = self.asked.take() {
            return match key.code {
                KeyCode::Char('y' | 'Y') => Wish::Stop(guest_id),
                _ => Wish::Nothing,
            };
        }
        let (place, page) = (self.place(), self.n_shown.max(1));
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Leave,
            KeyCode::Char('s' | 'k') => {
                self.asked = self.sample.as_ref().and_then(|sample| guest_at(sample, place));
            }
            KeyCode::Char(c) => {
                if let Some(&(.., order)) = Order::ALL.iter().find(|&&(key, ..)| key == c) {
                    self.sort_by(order);
                }
            }
            KeyCode::Up => self.select(place.saturating_sub(1)),
            KeyCode::Down => self.select(place + 1),
            KeyCode::PageUp => self.select(place.saturating_sub(page)),
            KeyCode::PageDown => self.select(place + page),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(self.n_guests()),
            _ => {}
        }
        Wish::Nothing
    }

    /// Scrolls so that the selected guest is among so many.
    pub(super) fn scroll(&mut self, n_shown: usize) {
        self.n_shown = n_shown;
        let (place, n_guests) = (self.place(), self.n_guests());
        let first = self.first.min(n_guests.saturating_sub(n_shown));
        // Where there is no room for any, the selected one is the first.
        self.first = first.clamp((place + 1).saturating_sub(n_shown.max(1)), place);
    }
}

/// The guest at this place, or the last.
fn guest_at(sample: &Sample, place: usize) -> Option<u64> {
    sample.guests.get(place).or(sample.guests.last()).map(|guest| guest.guest_id)
}
