use crate::{DEPTH_MAX, N_VALUES_MAX, WireError};

/// Checks that `bytes` are exactly one MessagePack value within the protocol's limits: depth, number of values,
/// lengths, UTF-8, no extension types, nothing left over.
///
/// Serde buffers internally tagged enums before it knows their type, so that limits checked while decoding come
/// too late; this walk does not recurse.
/// Source: <https://github.com/msgpack/msgpack/blob/master/spec.md>.
///
/// # Errors
/// Where and how the bytes are not such a value.
pub fn validate(bytes: &[u8]) -> Result<(), WireError> {
    validate_within(bytes, Shape { depth: DEPTH_MAX, n_values: N_VALUES_MAX })
}

/// How large a MessagePack value may be inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Arrays and maps in each other.
    pub depth: usize,
    /// Values, those that hold others included.
    pub n_values: u32,
}

/// As [`validate`], with limits of one's own.
///
/// # Errors
/// As for [`validate`].
pub fn validate_within(bytes: &[u8], max: Shape) -> Result<(), WireError> {
    let mut walk = Walk { bytes, at: 0 };
    let mut open = vec![0_u64; max.depth]; // values still to come, by level
    let mut depth = 0;
    let mut n_values = 0;
    loop {
        if n_values == max.n_values {
            return Err(WireError::TooManyValues { at: walk.at, limit: max.n_values });
        }
        n_values += 1;
        let at = walk.at;
        let n_children = walk.value()?;
        if n_children > 0 {
            if depth == max.depth {
                return Err(WireError::TooDeep { at, limit: max.depth });
            }
            open[depth] = n_children;
            depth += 1;
        } else {
            while depth > 0 {
                open[depth - 1] -= 1;
                if open[depth - 1] > 0 {
                    break;
                }
                depth -= 1;
            }
        }
        if depth == 0 {
            break;
        }
    }
    match bytes.len() - walk.at {
        0 => Ok(()),
        n_bytes => Err(WireError::Trailing { n_bytes }),
    }
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    /// Steps over one value's header and scalar bytes; the number of values inside it.
    fn value(&mut self) -> Result<u64, WireError> {
        let at = self.at;
        let marker = self.take(1)?[0];
        match marker {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => Ok(0),
            0x80..=0x8f => self.container(2 * u64::from(marker & 0x0f)),
            0x90..=0x9f => self.container(u64::from(marker & 0x0f)),
            0xa0..=0xbf => self.text(u64::from(marker & 0x1f)),
            0xc4..=0xc6 => {
                let n_bytes = self.length(1 << (marker - 0xc4))?;
                self.skip(n_bytes)
            }
            0xca..=0xd3 => {
                let n_bytes = match marker {
                    0xca => 4,
                    0xcb => 8,
                    _ => 1 << (marker & 0x03),
                };
                self.skip(n_bytes)
            }
            0xd9..=0xdb => {
                let n_bytes = self.length(1 << (marker - 0xd9))?;
                self.text(n_bytes)
            }
            0xdc | 0xdd => {
                let n = self.length(2 << (marker - 0xdc))?;
                self.container(n)
            }
            0xde | 0xdf => {
                let n = self.length(2 << (marker - 0xde))?;
                self.container(2 * n)
            }
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => Err(WireError::Marker { marker, at }),
        }
    }

    fn take(&mut self, n_bytes: u64) -> Result<&'a [u8], WireError> {
        let left = &self.bytes[self.at..];
        let taken = usize::try_from(n_bytes).ok().and_then(|n| left.get(..n)).ok_or(WireError::Length {
            at: self.at,
            n_bytes: usize::try_from(n_bytes).unwrap_or(usize::MAX),
            left: left.len(),
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn length(&mut self, n_bytes: u64) -> Result<u64, WireError> {
        Ok(self.take(n_bytes)?.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    }

    fn skip(&mut self, n_bytes: u64) -> Result<u64, WireError> {
        self.take(n_bytes).map(|_| 0)
    }

    fn text(&mut self, n_bytes: u64) -> Result<u64, WireError> {
        let at = self.at;
        std::str::from_utf8(self.take(n_bytes)?).map(|_| 0).map_err(|_| WireError::Utf8 { at })
    }

    /// Each value inside takes a byte at least.
    fn container(&self, n_values: u64) -> Result<u64, WireError> {
        let left = self.bytes.len() - self.at;
        if n_values > left as u64 {
            let n_bytes = usize::try_from(n_values).unwrap_or(usize::MAX);
            return Err(WireError::Length { at: self.at, n_bytes, left });
        }
        Ok(n_values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_each_type() {
        let values: [&[u8]; 20] = [
            &[0x00],
            &[0x7f],
            &[0xff],
            &[0xc0],
            &[0xc3],
            &[0xcc, 1],
            &[0xcd, 1, 2],
            &[0xce, 1, 2, 3, 4],
            &[0xcf, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0xd0, 1],
            &[0xd1, 1, 2],
            &[0xd2, 1, 2, 3, 4],
            &[0xd3, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0xca, 1, 2, 3, 4],
            &[0xcb, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0xa1, b'x'],
            &[0xd9, 1, b'x'],
            &[0xc5, 0, 2, 0xff, 0xfe],
            &[0x82, 0xa1, b'k', 0x90, 0xa1, b'l', 0x91, 0x80],
            &[0xde, 0, 1, 0xa1, b'k', 0xdc, 0, 2, 1, 2],
        ];
        for value in values {
            assert!(validate(value).is_ok(), "{value:02x?}");
            for n in 0..value.len() {
                assert!(matches!(validate(&value[..n]), Err(WireError::Length { .. })), "{value:02x?}");
            }
            let long = [value, &[0]].concat();
            assert!(matches!(validate(&long), Err(WireError::Trailing { n_bytes: 1 })), "{long:02x?}");
        }
    }

    #[test]
    fn refuses_by_name() {
        assert!(matches!(validate(&[0xc1]), Err(WireError::Marker { marker: 0xc1, at: 0 })));
        assert!(matches!(validate(&[0x91, 0xd4, 1, 1]), Err(WireError::Marker { marker: 0xd4, at: 1 })));
        assert!(matches!(validate(&[0xa2, 0xff, 0xff]), Err(WireError::Utf8 { at: 1 })));
        let huge = [0xdd, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(validate(&huge), Err(WireError::Length { n_bytes: 0xffff_ffff, left: 0, .. })));
        assert!(validate(&[[0x91; 32].as_slice(), &[0xc0]].concat()).is_ok());
        let deep = [[0x91; 33].as_slice(), &[0xc0]].concat();
        assert!(matches!(validate(&deep), Err(WireError::TooDeep { at: 32, limit: 32 })));
        assert!(matches!(validate(&vec![0x91; 1_000_000]), Err(WireError::TooDeep { .. })));
        let n_values = N_VALUES_MAX; // one of them the array itself
        let mut wide = [&[0xdd], &n_values.to_be_bytes()[..]].concat();
        wide.resize(5 + n_values as usize, 0xc0);
        assert!(matches!(validate(&wide), Err(WireError::TooManyValues { .. })));
    }
}
