//! Which process has a lock that this user may not open, as the kernel tells everybody.

use std::fs::Metadata;

/// Where Linux lists the locks of files; other systems have no such list.
const LOCKS: &str = "/proc/locks";

/// The process that has the lock of the file with this metadata; none as well where the list has the file under another device than its
/// metadata, as on btrfs. `Err` where the system does not tell.
pub(crate) fn holder(metadata: &Metadata) -> std::io::Result<Option<u32>> {
    Ok(find(&std::fs::read_to_string(LOCKS)?, &inode(metadata)))
}

/// `1: FLOCK  ADVISORY  WRITE 1234 00:1a:5678 0 EOF`; what only waits for a lock has an arrow after its number.
fn find(locks: &str, inode: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let words: [&str; 5] = std::array::from_fn(|_| words.next().unwrap_or_default());
        let ["FLOCK", _, "WRITE", pid, at] = words else { return None };
        if at == inode { pid.parse().ok() } else { None }
    })
}

/// A file as that list names it: its device, major and minor, and its number there.
fn inode(metadata: &Metadata) -> String {
    use std::os::unix::fs::MetadataExt as _;
    let dev = metadata.dev();
    format!("{:02x}:{:02x}:{}", rustix::fs::major(dev), rustix::fs::minor(dev), metadata.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_and_who_waits_for_it_is_not() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 00:1a:5678 0 EOF\n\
                     2: FLOCK  ADVISORY  READ 8 00:1a:5678 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 9 00:1a:5678 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 10 00:1a:567 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 11 00:1a:5678 0 EOF\n";
        assert_eq!(find(locks, "00:1a:5678"), Some(11));
        assert_eq!(find(locks, "00:1a:56"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernel_tells_who_has_a_lock() {
        // There the list and the metadata name the same device, which on some file systems of disks they do not.
        let Ok(file) = tempfile::tempfile_in("/dev/shm") else { return };
        if !std::path::Path::new(LOCKS).exists() {
            return;
        }
        let metadata = file.metadata().expect("it is open");
        assert_eq!(holder(&metadata).expect("Linux tells"), None);
        file.try_lock().expect("nobody has it");
        assert_eq!(holder(&metadata).expect("Linux tells"), Some(std::process::id()));
    }
}
