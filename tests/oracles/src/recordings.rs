//! Recordings: a forged or broken one is told from a whole one, and a whole one is kept as it is.

use trellis::fuzzing::Recording;

/// Reads the bytes as a file, or as payloads of frames whose seals are right, each after two bytes for its length.
///
/// # Panics
/// A recording changes when it is written and read, or one that was cut or changed passes for whole.
pub fn check(input: &[u8]) {
    let Some((&[kind, at], bytes)) = input.split_first_chunk() else { return };
    let file = file(kind, bytes);
    let recording = match Recording::read(&file) {
        Ok(recording) => recording,
        Err(reason) => return assert!(!reason.is_empty()),
    };
    let written = recording.write();
    let again = Recording::read(&written).expect("what was written is read");
    assert!(again == recording && again.write() == written);

    let at = usize::from(at) * file.len() / 256;
    assert!(Recording::read(&file[..at]).is_err(), "cut at {at}");
    let mut changed = file;
    changed[at] ^= 1 << (kind >> 5);
    assert!(Recording::read(&changed).is_err(), "changed at {at}");
}

fn file(kind: u8, bytes: &[u8]) -> Vec<u8> {
    match kind % 4 {
        0 => bytes.to_vec(),
        _ => Recording::forge(&payloads(bytes)),
    }
}

fn payloads(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut payloads, mut rest) = (Vec::new(), bytes);
    while let Some((&length, after)) = rest.split_first_chunk() {
        let n_bytes = usize::from(u16::from_le_bytes(length)).min(after.len());
        let (payload, after) = after.split_at(n_bytes);
        payloads.push(payload);
        rest = after;
    }
    payloads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forged_passes_for_whole() {
        let input = include_bytes!("../../fuzz/regressions/recordings/records-of-other-fields");
        let (&[kind, _], bytes) = input.split_first_chunk().expect("it is longer");
        let read = Recording::read(&file(kind, bytes));
        assert!(read.is_ok(), "{read:?}");
    }
}
