//! The thread that starts children: compilers, and processes of guests.
//!
//! A child that dies with its parent dies with the thread that started it, and threads of the runtime come and go.

use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread;

use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// The thread's jobs, once there is one. It lives as long as this process.
static JOBS: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);

/// How the kernel names the program that a process runs, whatever lies where it was started from by now.
#[cfg(target_os = "linux")]
const RUNNING: &str = "/proc/self/exe";

/// The running program, for children that are to be the same: not a newer one that was put in the place of its file meanwhile.
///
/// # Errors
/// The system does not say.
pub(crate) fn own_program() -> io::Result<PathBuf> {
    #[cfg(target_os = "linux")]
    if std::path::Path::new(RUNNING).exists() {
        return Ok(RUNNING.into());
    }
    std::env::current_exe()
}

/// Has `ps` show a child of the running program as it shows this process.
#[cfg(target_os = "linux")]
fn name(command: &mut Command) {
    if command.as_std().get_program() == RUNNING
        && let Some(name) = std::env::args_os().next()
    {
        command.arg0(name);
    }
}

/// Names this process after what it was called as: the kernel names one that was started by [`own_program`] after a link.
pub(crate) fn name_this() {
    #[cfg(target_os = "linux")]
    if let Some(called) = std::env::args_os().next()
        && let Some(name) = std::path::Path::new(&called).file_name()
        && let Ok(name) = std::ffi::CString::new(name.as_encoded_bytes())
    {
        // It is for people.
        let _ = rustix::thread::set_name(&name);
    }
}

/// Starts a child of the thread. The caller is within a runtime.
pub(crate) async fn start(mut command: Command) -> io::Result<Child> {
    #[cfg(target_os = "linux")]
    name(&mut command);
    let (done, is_done) = oneshot::channel();
    let runtime = Handle::current();
    let job = move || {
        let _runtime = runtime.enter();
        // Where nobody waits for it any more, it is killed as it is dropped.
        drop(done.send(spawned(&mut command)));
    };
    jobs()?.send(Box::new(job)).map_err(|_| ended())?;
    is_done.await.map_err(|_| ended())?
}

/// A child has the signals held that the thread which starts it has held.
fn spawned(command: &mut Command) -> io::Result<Child> {
    crate::upgrade::let_signals_through();
    let child = command.spawn();
    crate::upgrade::hold_signals();
    child
}

fn ended() -> io::Error {
    io::Error::other("the thread that starts other processes has ended")
}

fn jobs() -> io::Result<mpsc::Sender<Job>> {
    let mut jobs = JOBS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(jobs) = &*jobs {
        return Ok(jobs.clone());
    }
    let (sender, receiver) = mpsc::channel::<Job>();
    thread::Builder::new().name("spawner".to_owned()).spawn(move || {
        for job in receiver {
            job();
        }
    })?;
    *jobs = Some(sender.clone());
    Ok(sender)
}
