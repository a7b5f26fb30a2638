//! The timeline as the Firefox Profiler reads it: what the guest computed as samples, its calls and the device's steps as
//! markers, on two tracks with one clock.

use std::time::SystemTime;

use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerLocations, MarkerTiming, Profile, SamplingInterval, StaticSchemaMarker,
    StaticSchemaMarkerField, StringHandle, ThreadHandle, Timestamp,
};

use crate::profile::Entry;

/// Where markers are shown: in the overview as well, of which the track of the device has nothing else.
const PLACES: MarkerLocations = MarkerLocations::MARKER_CHART
    .union(MarkerLocations::MARKER_TABLE)
    .union(MarkerLocations::TIMELINE_OVERVIEW);

/// A host call.
struct Call {
    name: StringHandle,
    category: CategoryHandle,
    host_ms: f64,
}

impl StaticSchemaMarker for Call {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "HostCall";
    const DESCRIPTION: Option<&'static str> = Some("A call of the guest to its host");
    const LOCATIONS: MarkerLocations = PLACES;
    const CHART_LABEL: Option<&'static str> = Some("{marker.name}");
    const TABLE_LABEL: Option<&'static str> = Some("{marker.name}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[StaticSchemaMarkerField {
        key: "host",
        label: "Computed by the host",
        format: MarkerFieldFormat::Milliseconds,
        flags: MarkerFieldFlags::empty(),
    }];

    fn name(&self, _: &mut Profile) -> StringHandle {
        self.name
    }

    fn category(&self, _: &mut Profile) -> CategoryHandle {
        self.category
    }

    fn string_field_value(&self, _: u32) -> StringHandle {
        unreachable!("it has no texts")
    }

    fn number_field_value(&self, _: u32) -> f64 {
        self.host_ms
    }
}

/// A step of the device.
struct Step {
    category: CategoryHandle,
    n_rows: u32,
    n_tokens: u32,
}

impl StaticSchemaMarker for Step {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "DeviceStep";
    const DESCRIPTION: Option<&'static str> = Some("A step of the device that had rows of the guest");
    const LOCATIONS: MarkerLocations = PLACES;
    const CHART_LABEL: Option<&'static str> = Some("{marker.data.rows} rows");
    const TABLE_LABEL: Option<&'static str> = Some("{marker.data.rows} rows, {marker.data.tokens} tokens");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[
        StaticSchemaMarkerField {
            key: "rows",
            label: "Rows of the guest",
            format: MarkerFieldFormat::Integer,
            flags: MarkerFieldFlags::empty(),
        },
        StaticSchemaMarkerField {
            key: "tokens",
            label: "Tokens in them",
            format: MarkerFieldFormat::Integer,
            flags: MarkerFieldFlags::empty(),
        },
    ];

    fn name(&self, profile: &mut Profile) -> StringHandle {
        profile.intern_string("step")
    }

    fn category(&self, _: &mut Profile) -> CategoryHandle {
        self.category
    }

    fn string_field_value(&self, _: u32) -> StringHandle {
        unreachable!("it has no texts")
    }

    fn number_field_value(&self, field: u32) -> f64 {
        f64::from(if field == 0 { self.n_rows } else { self.n_tokens })
    }
}

/// The profile of a guest that was started then.
pub(super) fn profile(guest: &str, began: SystemTime, entries: &[Entry]) -> Profile {
    let mut profile = Profile::new("Trellis", began.into(), SamplingInterval::from_millis(1));
    let start = Timestamp::from_nanos_since_reference(0);
    let process = profile.add_process(guest, 1, start);
    let [guest, device] = [(1, "guest"), (2, "device")].map(|(number, name)| {
        // A main thread would have the name of its process.
        let thread = profile.add_thread(process, number, start, false);
        profile.set_thread_name(thread, name);
        profile.set_thread_show_markers_in_timeline(thread, true);
        profile.add_initial_visible_thread(thread);
        thread
    });
    profile.add_initial_selected_thread(guest);
    // What stands before the first sample of a track, or after its last, is not shown.
    profile.add_sample(guest, start, None, CpuDelta::ZERO, 1);
    let computing = profile.add_category("Guest", CategoryColor::Blue);
    let calling = profile.add_category("Host call", CategoryColor::Orange);
    let stepping = profile.add_category("Device", CategoryColor::Green);
    let mut texts = Vec::new();
    for entry in entries {
        match entry {
            Entry::Text(text) => texts.push(profile.intern_string(text)),
            Entry::Sample { at_ns, guest_ns, stack } => {
                // From the outermost function in.
                let names = stack.iter().rev().filter_map(|&text| texts.get(text as usize).copied());
                add_sample(&mut profile, guest, computing, *at_ns, *guest_ns, names.collect());
            }
            Entry::Call { name, begin, end } => {
                let Some(&name) = texts.get(*name as usize) else { continue };
                let host_ms = end.cpu_ns.saturating_sub(begin.cpu_ns) as f64 / 1e6;
                let call = Call { name, category: calling, host_ms };
                profile.add_marker(guest, interval(begin.at_ns, end.at_ns), call);
            }
            Entry::Step { end_ns, elapsed_ns, n_rows, n_tokens } => {
                let step = Step { category: stepping, n_rows: *n_rows, n_tokens: *n_tokens };
                profile.add_marker(device, interval(end_ns.saturating_sub(*elapsed_ns), *end_ns), step);
            }
            Entry::Begin(_) => {}
            Entry::End { end, .. } => {
                let end = Timestamp::from_nanos_since_reference(end.at_ns);
                profile.add_sample(guest, end, None, CpuDelta::ZERO, 1);
                for thread in [guest, device] {
                    profile.set_thread_end_time(thread, end);
                }
                profile.set_process_end_time(process, end);
            }
        }
    }
    profile
}

fn interval(start_ns: u64, end_ns: u64) -> MarkerTiming {
    let [start, end] = [start_ns, end_ns].map(Timestamp::from_nanos_since_reference);
    MarkerTiming::Interval(start, end)
}

fn add_sample(
    profile: &mut Profile,
    thread: ThreadHandle,
    category: CategoryHandle,
    at_ns: u64,
    guest_ns: u64,
    names: Vec<StringHandle>,
) {
    let frames = names.into_iter().map(|name| FrameInfo {
        frame: Frame::Label(name),
        category_pair: category.into(),
        flags: FrameFlags::empty(),
    });
    let stack = profile.intern_stack_frames(thread, frames);
    let at = Timestamp::from_nanos_since_reference(at_ns);
    profile.add_sample(thread, at, stack, CpuDelta::from_nanos(guest_ns), 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Moment;

    #[test]
    fn samples_calls_and_steps_are_on_tracks_of_one_clock() {
        let moment = |at_ns| Moment { at_ns, cpu_ns: at_ns / 2 };
        let entries = [
            Entry::Begin(moment(0)),
            Entry::Text("inner".to_owned()),
            Entry::Text("outer".to_owned()),
            Entry::Sample { at_ns: 1_500_000, guest_ns: 1_000_000, stack: vec![0, 1] },
            Entry::Call { name: 0, begin: moment(2_000_000), end: moment(4_000_000) },
            Entry::Step { end_ns: 3_500_000, elapsed_ns: 1_000_000, n_rows: 2, n_tokens: 9 },
            Entry::End { end: moment(5_000_000), n_lost: 0 },
        ];
        let json = serde_json::to_value(profile("chat", SystemTime::UNIX_EPOCH, &entries)).expect("JSON");
        assert_eq!(json["meta"]["product"], "Trellis");
        let threads = json["threads"].as_array().expect("threads");
        assert_eq!(threads.len(), 2);
        let track = |name: &str| threads.iter().find(|thread| thread["name"] == name).expect("a track");
        let (guest, device) = (track("guest"), track("device"));
        assert_eq!(guest["samples"]["length"], 3, "one at each end");
        assert_eq!(guest["stackTable"]["length"], 2);
        assert_eq!(
            (&guest["markers"]["startTime"][0], &guest["markers"]["endTime"][0]),
            (&2.0.into(), &4.0.into())
        );
        assert_eq!(device["markers"]["startTime"][0], 2.5);
        assert_eq!(device["markers"]["data"][0]["tokens"], 9.0);
    }
}
