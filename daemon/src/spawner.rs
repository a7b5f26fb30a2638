//! The thread that starts children: compilers, and processes of guests.
//!
//! A child that dies with its parent dies with the thread that started it, and threads of the runtime come and go.

use std::io;
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread;

use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// The thread's jobs, once there is one. It lives as long as this process.
static JOBS: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);

/// Starts a child of the thread. The caller is within a runtime.
pub(crate) async fn start(mut command: Command) -> io::Result<Child> {
    let (done, is_done) = oneshot::channel();
    let runtime = Handle::current();
    let job = move || {
        let _runtime = runtime.enter();
        // Where nobody waits for it any more, it is killed as it is dropped.
        drop(done.send(command.spawn()));
    };
    jobs()?.send(Box::new(job)).map_err(|_| ended())?;
    is_done.await.map_err(|_| ended())?
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
