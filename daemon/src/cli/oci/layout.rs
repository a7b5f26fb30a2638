//! An OCI image layout: a folder with an index of what lies in it. Of those that push to it at once each has its turn, so that
//! none writes an index without what another has just entered.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::artifact::{Artifact, Descriptor, MANIFEST, MANIFEST_BYTES_MAX, json, shortened};
use super::blobs::{BEGUN, Blobs, read_plain, write_whole};
use super::digest::Digest;
use super::error::OciError;
use super::reference::Reference;

const MARK: &str = "oci-layout";
const INDEX: &str = "index.json";
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// What an index calls one of its manifests.
const TAG: &str = "org.opencontainers.image.ref.name";

/// A push writes one component, which is over in a moment.
const TURN: Duration = Duration::from_secs(30);
const LOOKS_AGAIN: Duration = Duration::from_millis(20);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mark {
    image_layout_version: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
    /// What others wrote, such as what kind of artifact it is.
    #[serde(flatten)]
    other: Map<String, Value>,
}

/// A folder of artifacts.
#[derive(Debug)]
pub(super) struct Layout {
    blobs: Blobs,
}

impl Layout {
    pub(super) fn new(root: &Path) -> Self {
        Self { blobs: Blobs::new(root) }
    }

    /// The manifest that is meant.
    ///
    /// # Errors
    /// The folder is no layout, has none like it, or it is not what its digest says.
    pub(super) fn manifest(&self, reference: &Reference) -> Result<Vec<u8>, OciError> {
        let index =
            self.index()?.ok_or_else(|| OciError::NotFound(self.blobs.root().display().to_string()))?;
        let is_it = |one: &&Descriptor| match (reference.digest, &reference.tag) {
            (Some(digest), _) => one.digest == digest,
            (None, Some(tag)) => one.annotations.get(TAG) == Some(tag),
            (None, None) => true,
        };
        let mut found = index.manifests.iter().filter(is_it);
        let one = found.next().ok_or_else(|| OciError::NotFound(reference.to_string()))?;
        if reference.tag_or_digest().is_none() && found.next().is_some() {
            let tags: Vec<&str> = index
                .manifests
                .iter()
                .filter_map(|one| one.annotations.get(TAG))
                .map(String::as_str)
                .collect();
            return Err(self.no_layout(format!(
                "it has several artifacts, give a tag of these: {}",
                shortened(&tags.join(", "))
            )));
        }
        if one.size > MANIFEST_BYTES_MAX {
            let what = "the manifest".to_owned();
            return Err(OciError::TooLarge { what, n_bytes: one.size, limit_bytes: MANIFEST_BYTES_MAX });
        }
        self.blobs.read("the manifest", &one.digest, one.size)
    }

    /// Some content.
    ///
    /// # Errors
    /// It is not there, or not what its descriptor says.
    pub(super) fn blob(&self, what: &str, descriptor: &Descriptor) -> Result<Vec<u8>, OciError> {
        self.blobs.read(what, &descriptor.digest, descriptor.size)
    }

    /// Puts an artifact there, its entry of the index last.
    ///
    /// # Errors
    /// The folder is something else, or cannot be written, or another command does not come to its end with it.
    pub(super) async fn push(&self, artifact: &Artifact, tag: Option<&str>) -> Result<(), OciError> {
        let root = self.blobs.root();
        fs::create_dir_all(root).map_err(OciError::io(format!("make {}", root.display())))?;
        let _turn = self.turn(TURN).await?;
        let mut index = match self.index()? {
            Some(index) => index,
            None if self.is_something_else() => {
                return Err(self.no_layout("it is a folder of something else".to_owned()));
            }
            None => Index::empty(),
        };
        let written = |name: &str, content: &[u8]| {
            let path = root.join(name);
            write_whole(&path, content).map_err(OciError::io(format!("write {}", path.display())))
        };
        // First, so that what an interrupted push leaves is a layout that can be pushed to again.
        written(MARK, &json(&Mark { image_layout_version: "1.0.0".to_owned() }))?;
        for (descriptor, content) in [&artifact.config, &artifact.layer] {
            self.blobs.write(&descriptor.digest, content)?;
        }
        self.blobs.write(&artifact.digest, &artifact.manifest)?;
        index.put(&artifact.manifest, &artifact.digest, tag);
        written(INDEX, &json(&index))
    }

    /// The right to write the index, until it is dropped. It is a lock of the folder itself, which leaves no file in a layout; where a
    /// file system has no such locks there is nothing to wait for.
    async fn turn(&self, most: Duration) -> Result<Option<File>, OciError> {
        let Ok(folder) = File::open(self.blobs.root()) else { return Ok(None) };
        let waiting = async {
            loop {
                match folder.try_lock() {
                    Ok(()) => return true,
                    Err(TryLockError::WouldBlock) => tokio::time::sleep(LOOKS_AGAIN).await,
                    Err(TryLockError::Error(_)) => return false,
                }
            }
        };
        match tokio::time::timeout(most, waiting).await {
            Ok(is_locked) => Ok(Some(folder).filter(|_| is_locked)),
            Err(_) => Err(OciError::Busy { path: self.blobs.root().to_owned(), waited_s: most.as_secs() }),
        }
    }

    /// Whether a folder that is no layout has anything in it, but for what a push leaves that was killed as it began.
    fn is_something_else(&self) -> bool {
        let names = fs::read_dir(self.blobs.root()).into_iter().flatten().flatten();
        names.map(|entry| entry.file_name()).any(|name| !name.to_string_lossy().starts_with(BEGUN))
    }

    /// None where there is no layout yet.
    fn index(&self) -> Result<Option<Index>, OciError> {
        let root = self.blobs.root();
        let mark = match read_plain(&root.join(MARK), MARK, MANIFEST_BYTES_MAX) {
            Ok(mark) => mark,
            Err(OciError::NotFound(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mark: Mark = serde_json::from_slice(&mark).map_err(|error| self.no_layout(error.to_string()))?;
        if !mark.image_layout_version.starts_with("1.") {
            return Err(self.no_layout(format!("it is of version {}", mark.image_layout_version)));
        }
        let index = match read_plain(&root.join(INDEX), INDEX, MANIFEST_BYTES_MAX) {
            Ok(index) => index,
            // Of a first push that was interrupted.
            Err(OciError::NotFound(_)) => return Ok(Some(Index::empty())),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&index).map(Some).map_err(|error| self.no_layout(error.to_string()))
    }

    fn no_layout(&self, reason: String) -> OciError {
        OciError::NoLayout { path: self.blobs.root().to_owned(), reason }
    }
}

impl Index {
    fn empty() -> Self {
        Self {
            schema_version: 2,
            media_type: Some(INDEX_TYPE.to_owned()),
            manifests: Vec::new(),
            annotations: BTreeMap::new(),
            other: Map::new(),
        }
    }

    /// Enters a manifest. A tag is of one alone: what had it keeps its place, by its digest, only where it has another tag.
    fn put(&mut self, manifest: &[u8], digest: &Digest, tag: Option<&str>) {
        let tag_of = |one: &Descriptor| one.annotations.get(TAG).cloned();
        self.manifests.retain(|one| match tag {
            Some(tag) => tag_of(one).as_deref() != Some(tag),
            None => one.digest != *digest || tag_of(one).is_some(),
        });
        if tag.is_none() && self.manifests.iter().any(|one| one.digest == *digest) {
            return;
        }
        let mut entry = Descriptor::of(MANIFEST, manifest);
        entry.annotations.extend(tag.map(|tag| (TAG.to_owned(), tag.to_owned())));
        self.manifests.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::oci::artifact::Said;
    use crate::guest::World;

    fn artifact(component: &'static [u8]) -> Artifact {
        let world = World { imports: Vec::new(), exports: vec!["run".to_owned()] };
        Artifact::new(component.into(), &world, &Said::default())
    }

    fn push(layout: &Layout, artifact: &Artifact, tag: Option<&str>) -> Result<(), OciError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(layout.push(artifact, tag))
    }

    fn reference(folder: &Path, what: &str) -> Reference {
        format!("oci:{}{what}", folder.display()).parse().expect("valid")
    }

    #[test]
    fn a_tag_is_of_the_last_that_got_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("layout");
        let layout = Layout::new(&root);
        let (old, new) = (artifact(b"old"), artifact(b"new"));
        let get = |what: &str| layout.manifest(&reference(&root, what));
        assert!(matches!(get(""), Err(OciError::NotFound(_))));
        push(&layout, &old, Some("1")).expect("pushed");
        assert_eq!(get("").expect("the only one"), old.manifest);
        push(&layout, &new, Some("2")).expect("pushed");
        assert!(matches!(get(""), Err(OciError::NoLayout { .. })), "there are two");
        assert_eq!(get(":1").expect("there"), old.manifest);
        push(&layout, &new, Some("1")).expect("pushed");
        assert_eq!(get(":1").expect("there"), new.manifest);
        assert!(matches!(get(&format!("@{}", old.digest)), Err(OciError::NotFound(_))));
        push(&layout, &old, None).expect("pushed");
        push(&layout, &old, None).expect("pushed again");
        assert_eq!(get(&format!("@{}", old.digest)).expect("there"), old.manifest);
        assert_eq!(layout.blob("it", &old.layer.0).expect("there"), b"old");
        let index = fs::read_to_string(root.join(INDEX)).expect("written");
        assert_eq!(index.matches("mediaType").count(), 1 + 3, "{index}");
    }

    #[test]
    fn of_those_that_push_at_once_each_is_entered() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("layout");
        let names: Vec<String> = (0..4).map(|idx| format!("t{idx}")).collect();
        std::thread::scope(|scope| {
            for name in &names {
                let root = &root;
                scope.spawn(move || {
                    for round in 0..3 {
                        let component: &'static [u8] = format!("{name} {round}").into_bytes().leak();
                        push(&Layout::new(root), &artifact(component), Some(name)).expect("pushed");
                    }
                });
            }
        });
        let index = Layout::new(&root).index().expect("in order").expect("a layout");
        let mut tags: Vec<&String> =
            index.manifests.iter().filter_map(|one| one.annotations.get(TAG)).collect();
        tags.sort();
        assert_eq!(tags, names.iter().collect::<Vec<_>>());
        let names = fs::read_dir(&root).expect("readable");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("there").file_name().into_string();
        let mut files: Vec<String> = names.map(|entry| name(entry).expect("UTF-8")).collect();
        files.sort();
        assert_eq!(files, ["blobs", INDEX, MARK]);
    }

    #[tokio::test]
    async fn a_turn_that_does_not_end_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().expect("a folder");
        let other = File::open(folder.path()).expect("it is there");
        other.lock().expect("nobody has it");
        let layout = Layout::new(folder.path());
        let refused = layout.turn(Duration::from_millis(50)).await.expect_err("another has it");
        assert!(matches!(refused, OciError::Busy { .. }) && refused.is_retryable(), "{refused}");
        let artifact = artifact(b"x");
        let mut push = std::pin::pin!(layout.push(&artifact, None));
        let early = tokio::time::timeout(Duration::from_millis(50), push.as_mut()).await;
        assert!(early.is_err() && fs::read_dir(folder.path()).expect("readable").count() == 0);
        drop(other);
        push.await.expect("it is its turn");
    }

    #[test]
    fn what_an_interrupted_push_leaves_can_be_pushed_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let layout = Layout::new(folder.path());
        fs::write(folder.path().join(format!("{BEGUN}x")), "half of a mark").expect("written");
        push(&layout, &artifact(b"x"), Some("1")).expect("pushed");
        // All but the index.
        fs::remove_file(folder.path().join(INDEX)).expect("it was there");
        let get = || layout.manifest(&reference(folder.path(), ":1"));
        assert!(matches!(get(), Err(OciError::NotFound(_))));
        push(&layout, &artifact(b"x"), Some("1")).expect("pushed");
        get().expect("there");
    }

    #[test]
    fn what_others_wrote_of_their_artifacts_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let layout = Layout::new(folder.path());
        fs::write(folder.path().join(MARK), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("written");
        let digest = Digest::of(b"x");
        let index = format!(
            r#"{{"schemaVersion":2,"artifactType":"a/b","manifests":[{{"mediaType":"{MANIFEST}","digest":"{digest}","size":1,"platform":{{"os":"linux"}}}}]}}"#
        );
        fs::write(folder.path().join(INDEX), index).expect("written");
        push(&layout, &artifact(b"mine"), Some("1")).expect("pushed");
        let index: Value =
            serde_json::from_slice(&fs::read(folder.path().join(INDEX)).expect("written")).expect("JSON");
        assert_eq!(index["artifactType"], "a/b");
        assert_eq!(index["manifests"][0]["platform"]["os"], "linux");
        assert_eq!(index["manifests"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn a_folder_of_something_else_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("thesis.tex"), "x").expect("written");
        let layout = Layout::new(folder.path());
        assert!(matches!(push(&layout, &artifact(b"x"), None), Err(OciError::NoLayout { .. })));
        assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1);
    }

    #[test]
    fn an_index_cannot_lead_out_of_the_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let layout = Layout::new(folder.path());
        fs::write(folder.path().join(MARK), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("written");
        let entry = |digest: &str| {
            let index = format!(
                r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST}","digest":"{digest}","size":1}}]}}"#
            );
            fs::write(folder.path().join(INDEX), index).expect("written");
            layout.manifest(&reference(folder.path(), "")).expect_err(digest)
        };
        let up = "../".repeat(20);
        for digest in ["sha256:../../../etc/passwd".to_owned(), format!("sha256:{up}etc"), "../x".to_owned()]
        {
            assert!(matches!(entry(&digest), OciError::NoLayout { .. }), "{digest}");
        }
    }
}
