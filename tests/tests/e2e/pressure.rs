//! Memory that is short: what the daemon can have again goes, and no token changes.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write as _;
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};
use trellis::config::{Config, Device};
use trellis_client::Client;
use trellis_tests::daemons::{self, Served, run, until, with};
use trellis_tests::device::device;
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;
use crate::saved::{Keeper, text};

/// Stories that are saved, of which the device holds but a few.
const N_STORIES: usize = 8;

/// A daemon that hears of pressure by this pipe.
fn serve(pipe: &Path) -> Served {
    mkfifoat(CWD, pipe, Mode::RUSR | Mode::WUSR).expect("made");
    let config = Config { kv_bytes: Some(12 << 20), kv_host_bytes: Some(64 << 20), ..daemons::config(exe()) };
    Served::start_with(exe(), &config, &[("MEMORY_PRESSURE_WATCH", pipe.to_str().expect("UTF-8"))])
}

fn press(pipe: &Path) {
    let mut pipe = fs::OpenOptions::new().write(true).open(pipe).expect("the daemon listens");
    pipe.write_all(b"x").expect("written");
}

/// The number of a metric, of the line that begins so.
fn metric(served: &Served, line: &str) -> f64 {
    let told = daemons::output(&mut served.trellis(&["metrics"]));
    let told = String::from_utf8(told.stdout).expect("text");
    let found = told.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("no {line}: {told}"))
}

/// Opens each story, and draws on.
async fn drawn(keeper: &mut Keeper) -> Vec<Vec<u32>> {
    let mut drawn = Vec::new();
    for idx in 0..N_STORIES {
        let (tokens, word) = keeper.tell(format!("open story{idx}")).await;
        assert_eq!(word, "opened");
        drawn.push(tokens);
    }
    drawn
}

#[test]
fn kv_in_host_memory_and_programs_go_and_all_that_is_drawn_stays_the_same() {
    const RELEASED: &str = "trellis_memory_pressure_released_bytes_total";
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pressure");
    let served = serve(&pipe);
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        // Its program is ready and nobody runs it.
        let _ = run(&client, &guests::example("complete"), with(&["--max-tokens", "1", "Once"])).await.well();
        let mut keeper = Keeper::begin(&served).await;
        for idx in 0..N_STORIES {
            // None begins as another does.
            let story = text().replacen("Once", &format!("{idx} times"), 1);
            assert_eq!(keeper.tell(format!("save story{idx} {story}")).await.1, "saved");
        }
        let before = drawn(&mut keeper).await;
        assert!(metric(&served, "trellis_kv_pages_on_host{model_name=\"tiny\"}") > 0.0);
        assert_eq!(metric(&served, "trellis_memory_pressure_events_total"), 0.0);
        let n_programs = metric(&served, "trellis_programs");

        press(&pipe);
        until("it is heard", async || metric(&served, "trellis_memory_pressure_events_total") >= 1.0).await;
        let n_bytes = metric(&served, &format!("{RELEASED}{{what=\"kv\"}}"));
        assert!(n_bytes > 0.0);
        if device() == Device::Cuda {
            // All that goes within a second at most is locked by now, and free once the contexts have given up what is in there.
            assert!(n_bytes >= f64::from((64 << 20) - (16 << 20)), "{n_bytes} bytes");
        }
        assert!(metric(&served, &format!("{RELEASED}{{what=\"programs\"}}")) > 0.0);
        assert_eq!(metric(&served, "trellis_kv_pages_on_host{model_name=\"tiny\"}"), 0.0);
        assert!(metric(&served, "trellis_kv_pages_given_up_total{model_name=\"tiny\"}") > 0.0);
        assert!(metric(&served, "trellis_programs") < n_programs);
        assert!(served.log().contains("memory is short"), "{}", served.log());

        assert_eq!(drawn(&mut keeper).await, before, "computed again, token for token");
        keeper.end().await;
        let _ = run(&client, &guests::example("complete"), with(&["--max-tokens", "1", "Once"])).await.well();
    });
}
