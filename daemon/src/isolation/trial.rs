//! Whether a process of guests can be confined on this machine, and how far: found out before there are guests.

use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::confine::Confinement;
use super::error::SpawnError;
use super::spawn::{GuestProcess, ProcessSettings};

/// How long a process may take to end once nobody speaks to it; then it is killed.
const END_TIME: Duration = Duration::from_secs(5);

/// How a process of guests that becomes of this executable is confined here. Blocks until one has been started and has ended.
///
/// # Errors
/// It does not start, or cannot be confined.
pub(crate) fn confinement(exe: &Path) -> Result<Confinement, SpawnError> {
    let exe = exe.to_owned();
    let tried = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let settings = ProcessSettings { user: "nobody yet".to_owned(), ..ProcessSettings::default() };
            let (mut process, sender, receiver) = GuestProcess::spawn(&exe, &settings).await?;
            let confinement = process.confinement().clone();
            drop((sender, receiver));
            // What became of it says nothing of guests.
            let _ = tokio::time::timeout(END_TIME, process.wait()).await;
            Ok(confinement)
        })
    };
    // The caller may be within a runtime, which must not wait.
    let trying = thread::Builder::new().name("guests-try".to_owned()).spawn(tried)?;
    trying.join().unwrap_or_else(|_| Err(io::Error::other("the thread that tries it panicked").into()))
}
