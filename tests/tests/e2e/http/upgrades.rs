//! Another program in the place of a daemon with the front.

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use trellis_tests::daemons::output;

use super::client::Fronted;

/// Has the same program take the place of itself.
fn upgrade(front: &Fronted) {
    let ended = output(&mut front.served.trellis(&["upgrade"]));
    assert!(ended.status.success(), "{ended:?}\n{}", front.served.log());
}

#[test]
fn a_port_is_nobody_elses_while_another_program_takes_the_daemons_place() {
    let front = Fronted::on_port();
    let address = front.place().to_owned();
    let token = front.token_header();
    let is_over = AtomicBool::new(false);
    let n_taken = thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            let mut n_taken = 0;
            while !is_over.load(Ordering::Relaxed) {
                n_taken += usize::from(TcpListener::bind(&address).is_ok());
                thread::sleep(Duration::from_millis(1));
            }
            n_taken
        });
        let ended = output(&mut front.served.trellis(&["upgrade"]));
        is_over.store(true, Ordering::Relaxed);
        assert!(ended.status.success(), "{ended:?}\n{}", front.served.log());
        stranger.join().expect("no panic")
    });
    assert_eq!(n_taken, 0, "the port was free for a moment");
    let models = front.request("GET", "/v1/models", &token, "").json();
    assert_eq!(models["data"][0]["id"], "tiny");
}

#[test]
fn a_socket_stays_the_same_while_another_program_takes_the_daemons_place() {
    let front = Fronted::on_socket();
    let inode = || std::fs::symlink_metadata(front.place()).expect("it is there").ino();
    let made = inode();
    for _ in 0..2 {
        upgrade(&front);
        assert_eq!(inode(), made);
        assert_eq!(front.request("GET", "/v1/models", "", "").json()["data"][0]["id"], "tiny");
    }
}
