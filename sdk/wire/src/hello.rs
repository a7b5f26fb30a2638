use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{FRAME_BYTES_MAX, FRAME_BYTES_MIN, VERSION_MAX, VERSION_MIN, WireError};

/// The first byte is no ASCII, so that a text protocol never passes for this one.
const MAGIC: [u8; 8] = *b"\x89TRELLIS";
const FIXED_BYTES: usize = 17;

/// Name and version of this build, as sent in the hello.
pub const BUILD: &str = concat!("trellis ", env!("CARGO_PKG_VERSION"));

/// The first bytes of each side. Their layout never changes, whatever the versions:
///
/// | bytes | what |
/// |---|---|
/// | 8 | `89 54 52 45 4c 4c 49 53` |
/// | 2 | oldest version, little endian |
/// | 2 | newest version, little endian |
/// | 4 | bytes of the largest frame it reads, little endian |
/// | 1 | bytes of the build |
/// | 0..=255 | build, UTF-8 |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The oldest version it speaks.
    pub version_min: u16,
    /// The newest version it speaks.
    pub version_max: u16,
    /// Bytes of the largest frame it reads.
    pub frame_bytes_max: u32,
    /// Name and version of its build, at most 255 bytes.
    pub build: String,
}

impl Hello {
    /// What this crate speaks.
    #[must_use]
    pub fn ours() -> Self {
        Self {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            frame_bytes_max: FRAME_BYTES_MAX,
            build: BUILD.to_owned(),
        }
    }

    /// The bytes of the hello; a build longer than 255 bytes is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let build = &self.build.as_bytes()[..self.build.floor_char_boundary(255)];
        let mut bytes = Vec::with_capacity(FIXED_BYTES + build.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.version_min.to_le_bytes());
        bytes.extend_from_slice(&self.version_max.to_le_bytes());
        bytes.extend_from_slice(&self.frame_bytes_max.to_le_bytes());
        bytes.push(u8::try_from(build.len()).expect("cut to 255 bytes"));
        bytes.extend_from_slice(build);
        bytes
    }

    /// Reads the peer's hello, and not a byte more.
    ///
    /// # Errors
    /// The peer speaks something else, its numbers make no sense, or the connection ended.
    pub async fn read<R: AsyncRead + Unpin>(reader: &mut R) -> Result<Self, WireError> {
        let mut magic = [0; 8];
        reader.read_exact(&mut magic).await?;
        if magic != MAGIC {
            return Err(WireError::Magic { found: magic });
        }
        let version_min = reader.read_u16_le().await?;
        let version_max = reader.read_u16_le().await?;
        let frame_bytes_max = reader.read_u32_le().await?;
        let n_build_bytes = reader.read_u8().await?;
        let mut build = vec![0; usize::from(n_build_bytes)];
        reader.read_exact(&mut build).await?;
        if version_min > version_max {
            return Err(WireError::VersionRange { min: version_min, max: version_max });
        }
        if frame_bytes_max < FRAME_BYTES_MIN {
            return Err(WireError::FrameLimit { value: frame_bytes_max, limit: FRAME_BYTES_MIN });
        }
        let build = String::from_utf8_lossy(&build).into_owned();
        Ok(Self { version_min, version_max, frame_bytes_max, build })
    }

    /// Writes the hello.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn write<W: AsyncWrite + Unpin>(&self, writer: &mut W) -> Result<(), WireError> {
        writer.write_all(&self.encode()).await?;
        Ok(writer.flush().await?)
    }
}

/// The newest version that both sides speak.
///
/// # Errors
/// [`WireError::Version`] when there is none.
pub fn negotiate(ours: &Hello, theirs: &Hello) -> Result<u16, WireError> {
    let version = ours.version_max.min(theirs.version_max);
    if version < ours.version_min.max(theirs.version_min) {
        return Err(WireError::Version {
            ours: (ours.version_min, ours.version_max),
            theirs: (theirs.version_min, theirs.version_max),
            build: theirs.build.clone(),
        });
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(version_min: u16, version_max: u16) -> Hello {
        Hello { version_min, version_max, ..Hello::ours() }
    }

    #[tokio::test]
    async fn bytes_never_change() {
        let hello =
            Hello { version_min: 1, version_max: 0x0203, frame_bytes_max: 0x0010_0000, build: "b 1".into() };
        let bytes = b"\x89TRELLIS\x01\x00\x03\x02\x00\x00\x10\x00\x03b 1";
        assert_eq!(hello.encode(), bytes);
        let mut rest = &[&bytes[..], b"next"].concat()[..];
        assert_eq!(Hello::read(&mut rest).await.unwrap(), hello);
        assert_eq!(rest, b"next");
    }

    #[tokio::test]
    async fn refuses_what_makes_no_sense() {
        let read = |bytes: Vec<u8>| async move { Hello::read(&mut &bytes[..]).await.unwrap_err() };
        let http = read(b"GET / HTTP/1.1\r\nHost: x\r\n".to_vec()).await;
        assert!(matches!(http, WireError::Magic { found } if &found == b"GET / HT"));
        assert!(matches!(read(hello(3, 2).encode()).await, WireError::VersionRange { min: 3, max: 2 }));
        let small = Hello { frame_bytes_max: 100, ..Hello::ours() };
        assert!(matches!(read(small.encode()).await, WireError::FrameLimit { value: 100, .. }));
        let whole = Hello::ours().encode();
        for n in 0..whole.len() {
            assert!(matches!(read(whole[..n].to_vec()).await, WireError::Io(_)));
        }
    }

    #[test]
    fn long_builds_are_cut_between_characters() {
        let long = Hello { build: "é".repeat(200), ..Hello::ours() };
        assert_eq!(long.encode().len(), FIXED_BYTES + 254);
    }

    #[test]
    fn picks_the_newest_common_version() {
        assert_eq!(negotiate(&hello(1, 4), &hello(2, 3)).unwrap(), 3);
        assert_eq!(negotiate(&hello(2, 2), &hello(1, 9)).unwrap(), 2);
        let error = negotiate(&hello(1, 2), &hello(3, 4)).unwrap_err();
        assert!(matches!(error, WireError::Version { ours: (1, 2), theirs: (3, 4), .. }));
        assert!(negotiate(&hello(3, 4), &hello(1, 2)).is_err());
    }
}
