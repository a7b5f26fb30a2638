//! One shared library: the names it goes by, the file behind them, its version.

use std::error::Error as _;
use std::ffi::c_int;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::Library as Opened;
use serde::{Serialize, Serializer};

use super::places::ProbedFolder;

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Versions of one major number understand each other's code.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What came of looking for one library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Library {
    /// What it is called.
    pub name: &'static str,
    /// File names that the system's loader was asked for, in this order, until one was there.
    pub looked_for: Vec<String>,
    /// What is used.
    pub loaded: Option<Loaded>,
    /// Files that are there and could not be loaded, and why.
    pub refused: Vec<Refused>,
    /// Functions that are needed and that it does not have.
    pub missing_functions: Vec<&'static str>,
}

/// A loaded library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loaded {
    /// The name by which it was found.
    pub name: String,
    /// The file, where the system tells.
    pub path: Option<PathBuf>,
    /// The version of CUDA that it says it is of, or, of a driver, that it is for.
    pub version: Option<Version>,
    /// How it was found.
    pub found_by: FoundBy,
}

/// How a library was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FoundBy {
    /// The system's loader knows where it is.
    Loader,
    /// It lies in a folder that the loader does not search, and was loaded from there beforehand.
    Folder(PathBuf),
}

/// A file that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The file.
    pub path: PathBuf,
    /// What the loader said.
    pub reason: String,
}

/// What to look for.
pub(super) struct Spec<'a> {
    /// What it is called.
    pub(super) name: &'static str,
    /// Names as the code that uses it asks the loader for them, in its order.
    pub(super) candidates: Vec<String>,
    /// Names with a version that fits, the best first. One is loaded before that code asks for a candidate.
    pub(super) preferred: Vec<String>,
    /// Functions that are needed.
    pub(super) functions: &'a [&'static str],
    /// How it tells its version.
    pub(super) version: fn(&Opened) -> Option<Version>,
}

impl Spec<'_> {
    /// Looks for the library and leaves it loaded.
    ///
    /// `dlopen` of a name without a slash takes a library that is loaded already and has that name as its soname
    /// (`_dl_map_object` in glibc's `elf/dl-load.c`), so that whatever is loaded here, from wherever it lies, is what
    /// later requests for `libNAME.so.MAJOR` get.
    pub(super) fn find(self, places: &[ProbedFolder]) -> (Library, Option<Opened>) {
        let Self { name, candidates, preferred, functions, version } = self;
        let mut refused = Vec::new();
        let folder = preferred.iter().find_map(|name| preload(name, places, &mut refused));
        let mut found =
            Library { name, looked_for: Vec::new(), loaded: None, refused, missing_functions: Vec::new() };
        for candidate in candidates {
            if found.looked_for.contains(&candidate) {
                continue;
            }
            let opened = open(Path::new(&candidate)).ok();
            found.looked_for.push(candidate.clone());
            let Some(opened) = opened else { continue };
            let path = functions.iter().find_map(|function| path_of(&opened, function));
            let found_by = match folder {
                Some(FoundBy::Folder(folder)) if path.as_ref().is_none_or(|path| is_in(path, &folder)) => {
                    FoundBy::Folder(folder)
                }
                _ => FoundBy::Loader,
            };
            let path = path.or_else(|| match &found_by {
                FoundBy::Folder(folder) => Some(folder.join(&candidate)),
                FoundBy::Loader => None,
            });
            found.missing_functions =
                functions.iter().copied().filter(|function| !has(&opened, function)).collect();
            found.loaded = Some(Loaded { name: candidate, path, version: version(&opened), found_by });
            return (found, Some(opened));
        }
        (found, None)
    }
}

/// Loads the library of this name for the rest of the process: from where the loader finds it, or else from one of
/// the places.
fn preload(name: &str, places: &[ProbedFolder], refused: &mut Vec<Refused>) -> Option<FoundBy> {
    if let Ok(opened) = open(Path::new(name)) {
        keep(opened);
        return Some(FoundBy::Loader);
    }
    for place in places.iter().filter(|place| place.is_there) {
        let path = place.path.join(name);
        if !path.is_file() {
            continue;
        }
        match open(&path) {
            Ok(opened) => {
                keep(opened);
                return Some(FoundBy::Folder(place.path.clone()));
            }
            Err(error) => {
                // The error itself only says that `dlopen` failed.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                refused.push(Refused { path, reason });
            }
        }
    }
    None
}

pub(super) fn open(name: &Path) -> Result<Opened, libloading::Error> {
    // SAFETY: only NVIDIA's libraries are asked for; their initialisers expect nothing of the program.
    unsafe { Opened::new(name) }
}

/// Leaves a library loaded: its handle is never closed.
pub(super) fn keep(opened: Opened) {
    std::mem::forget(opened);
}

fn has(opened: &Opened, function: &str) -> bool {
    address(opened, function).is_some()
}

/// The address of a function of a library, which is not called through it.
fn address(opened: &Opened, function: &str) -> Option<usize> {
    // SAFETY: the symbol is looked up and only its address is taken.
    let symbol = unsafe { opened.get::<unsafe extern "C" fn()>(function) }.ok()?;
    Some(*symbol as usize)
}

/// The file that a function of a library was loaded from.
fn path_of(opened: &Opened, function: &str) -> Option<PathBuf> {
    let address = address(opened, function)?;
    mapped_at(&fs::read_to_string("/proc/self/maps").ok()?, address)
}

/// The file at an address; lines are `start-end permissions offset device inode path`.
fn mapped_at(maps: &str, address: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let hex = |digits| usize::from_str_radix(digits, 16).ok();
        let is_here = (hex(start)?..hex(end)?).contains(&address);
        is_here.then(|| rest.find('/').map(|at| PathBuf::from(&rest[at..])))?
    })
}

/// Whether a file lies in a folder, links followed.
fn is_in(path: &Path, folder: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.parent().is_some_and(|parent| real(parent) == real(folder))
        || path.file_name().is_some_and(|name| real(&folder.join(name)) == real(path))
}

// SAFETY: the signatures are those of NVIDIA's headers; what a call needs is said where it is made.
type NvrtcVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type CublasLtVersion = unsafe extern "C" fn() -> usize;
type DriverVersion = unsafe extern "C" fn(*mut c_int) -> c_int;

/// `nvrtcVersion`
pub(super) fn nvrtc_version(opened: &Opened) -> Option<Version> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the type is that of nvrtc.h.
    let function = unsafe { opened.get::<NvrtcVersion>("nvrtcVersion") }.ok()?;
    // SAFETY: both pointers are valid for the call.
    let status = unsafe { function(&mut major, &mut minor) };
    (status == 0).then_some(Version { major: major.try_into().ok()?, minor: minor.try_into().ok()? })
}

/// `cublasLtGetVersion`: 130100 is 13.1.
pub(super) fn cublas_lt_version(opened: &Opened) -> Option<Version> {
    // SAFETY: the type is that of cublasLt.h.
    let function = unsafe { opened.get::<CublasLtVersion>("cublasLtGetVersion") }.ok()?;
    // SAFETY: it takes nothing and may be called at any time.
    let version = u32::try_from(unsafe { function() }).ok()?;
    // Before CUDA 12 the thousands were the major number.
    Some(if version >= 100_000 {
        Version { major: version / 10_000, minor: version / 100 % 100 }
    } else {
        Version { major: version / 1000, minor: version / 100 % 10 }
    })
}

/// `cuDriverGetVersion`: 13010 is 13.1.
pub(super) fn driver_version(opened: &Opened) -> Option<Version> {
    let mut version = 0;
    // SAFETY: the type is that of cuda.h.
    let function = unsafe { opened.get::<DriverVersion>("cuDriverGetVersion") }.ok()?;
    // SAFETY: the pointer is valid for the call.
    let status = unsafe { function(&mut version) };
    let version = u32::try_from(version).ok().filter(|&version| status == 0 && version > 0)?;
    Some(Version { major: version / 1000, minor: version / 10 % 100 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &Opened) -> Option<Version> {
        None
    }

    #[test]
    fn a_mapped_file_is_found_by_an_address_in_it() {
        let maps = "1000-2000 r--p 00000000 08:01 17 /usr/lib/a b.so\n2000-3000 rw-p 00000000 00:00 0 \n";
        assert_eq!(mapped_at(maps, 0x1fff), Some(PathBuf::from("/usr/lib/a b.so")));
        assert_eq!(mapped_at(maps, 0x2000), None);
        assert_eq!(mapped_at(maps, 0x3000), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_of_the_system_is_found_and_what_it_lacks_is_named() {
        let spec = Spec {
            name: "the C library",
            candidates: vec!["libnosuch.so.1".to_owned(), "libc.so.6".to_owned(), "libm.so.6".to_owned()],
            preferred: vec![],
            functions: &["malloc", "no_such_function"],
            version: nothing,
        };
        let (library, opened) = spec.find(&[]);
        assert_eq!(library.looked_for, ["libnosuch.so.1", "libc.so.6"]);
        assert_eq!(library.missing_functions, ["no_such_function"]);
        let loaded = library.loaded.expect("it is loaded");
        assert_eq!((loaded.name.as_str(), loaded.found_by), ("libc.so.6", FoundBy::Loader));
        assert!(opened.is_some() && loaded.path.expect("Linux tells").is_file());
    }

    #[test]
    fn what_is_not_a_library_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("libnosuch.so.1"), "text").expect("written");
        let place = ProbedFolder { path: folder.path().to_owned(), named_by: "the test", is_there: true };
        let spec = Spec {
            name: "nothing",
            candidates: vec!["libnosuch.so.1".to_owned()],
            preferred: vec!["libnosuch.so.1".to_owned()],
            functions: &[],
            version: nothing,
        };
        let (library, opened) = spec.find(&[place]);
        assert!(library.loaded.is_none() && opened.is_none());
        assert_eq!(library.refused.len(), 1);
        assert!(library.refused[0].reason.contains("libnosuch.so.1"), "{:?}", library.refused);
    }
}
