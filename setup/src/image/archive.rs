//! The OCI archive (<https://github.com/opencontainers/image-spec>, version 1.1): a tar of `oci-layout`, `index.json` and
//! blobs that are named by their digests.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::tar::{Entry, Tar};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// The programs for an architecture.
#[derive(Debug, Clone)]
pub(super) struct Platform {
    /// `amd64` or `arm64`.
    pub(super) architecture: String,
    /// Names and contents.
    pub(super) programs: Vec<(String, Vec<u8>)>,
}

/// An archive.
pub(super) struct Archive {
    pub(super) bytes: Vec<u8>,
    /// The digest of the image, which names all of its content.
    pub(super) digest: String,
}

impl Archive {
    /// The archive of an image with this name. The same input gives the same bytes.
    pub(super) fn new(name: &str, platforms: &[Platform]) -> Result<Self> {
        let mut blobs = Blobs::default();
        let mut manifests = Vec::new();
        for platform in platforms {
            let layer = layer(&platform.programs);
            let diff = digest(&layer);
            let layer = blobs.add(LAYER, layer);
            let config = blobs.add(CONFIG, serde_json::to_vec(&config(&platform.architecture, &diff))?);
            let manifest =
                json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]});
            let mut manifest = blobs.add(MANIFEST, serde_json::to_vec(&manifest)?);
            manifest["platform"] = json!({"architecture": platform.architecture, "os": "linux"});
            manifests.push(manifest);
        }
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        let mut image = blobs.add(INDEX, serde_json::to_vec(&index)?);
        let digest = image["digest"].as_str().unwrap_or_default().to_owned();
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        // containerd reads the first name; other tools read the second one.
        image["annotations"] =
            json!({"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag});
        let top = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [image]});

        let mut tar = Tar::default();
        let mut file = |name: &str, bytes: &[u8]| tar.add(name, Entry::File { mode: 0o644, bytes });
        file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);
        file("index.json", &serde_json::to_vec(&top)?);
        for (digest, bytes) in &blobs.0 {
            file(&format!("blobs/sha256/{digest}"), bytes);
        }
        Ok(Self { bytes: tar.finish(), digest })
    }
}

/// The files of the image.
fn layer(programs: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Tar::default();
    for (name, bytes) in programs {
        tar.add(name, Entry::File { mode: 0o755, bytes });
    }
    // Runtimes pass paths below /var/run, and mount the service account there.
    tar.add("run/", Entry::Folder { mode: 0o755 });
    tar.add("var/", Entry::Folder { mode: 0o755 });
    tar.add("var/run", Entry::Link { target: "/run" });
    tar.finish()
}

fn config(architecture: &str, diff: &str) -> Value {
    json!({
        "architecture": architecture,
        "os": "linux",
        "config": {
            "Entrypoint": ["/tortie"],
            "Env": ["PATH=/"],
            "WorkingDir": "/",
            "Labels": {
                "org.opencontainers.image.title": "tortie",
                "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    })
}

/// Contents by their digest in hexadecimal.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Adds a blob and returns its descriptor.
    fn add(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let (digest, size) = (digest(&bytes), bytes.len());
        self.0.insert(digest.trim_start_matches("sha256:").to_owned(), bytes);
        json!({"mediaType": media_type, "digest": digest, "size": size})
    }
}

fn digest(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hexadecimal: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hexadecimal}")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn platforms() -> Vec<Platform> {
        let programs = |text: &str| {
            vec![("tortie".to_owned(), text.as_bytes().to_vec()), ("tortie-cni".to_owned(), vec![7; 1000])]
        };
        let platform = |name: &str| Platform { architecture: name.to_owned(), programs: programs(name) };
        vec![platform("amd64"), platform("arm64")]
    }

    /// Unpacks with the system's tar, which is not ours.
    fn unpack(bytes: &[u8], folder: &std::path::Path) {
        let file = folder.join("archive.tar");
        std::fs::write(&file, bytes).unwrap();
        let output = Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The content that a descriptor names, if digest and size are right.
    fn blob(folder: &std::path::Path, descriptor: &Value) -> Vec<u8> {
        let digest_text = descriptor["digest"].as_str().unwrap();
        let bytes = std::fs::read(folder.join("blobs").join(digest_text.replace(':', "/"))).unwrap();
        assert_eq!(descriptor["size"], bytes.len());
        assert_eq!(digest_text, digest(&bytes));
        bytes
    }

    #[test]
    fn every_part_is_reached_from_the_index_by_right_digests_and_sizes() {
        let archive = Archive::new("registry.example/tortie:1.2", &platforms()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        unpack(&archive.bytes, folder.path());
        let read = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(folder.path().join(name)).unwrap()).unwrap()
        };
        assert_eq!(read("oci-layout")["imageLayoutVersion"], "1.0.0");
        let top = read("index.json");
        let image = &top["manifests"][0];
        assert_eq!(image["annotations"]["io.containerd.image.name"], "registry.example/tortie:1.2");
        assert_eq!(image["annotations"]["org.opencontainers.image.ref.name"], "1.2");
        assert_eq!(image["digest"], archive.digest);
        let index: Value = serde_json::from_slice(&blob(folder.path(), image)).unwrap();
        let mut reached = 1;
        for (manifest, name) in index["manifests"].as_array().unwrap().iter().zip(["amd64", "arm64"]) {
            assert_eq!(manifest["platform"], json!({"os": "linux", "architecture": name}));
            let content: Value = serde_json::from_slice(&blob(folder.path(), manifest)).unwrap();
            let config: Value = serde_json::from_slice(&blob(folder.path(), &content["config"])).unwrap();
            assert_eq!(config["architecture"], name);
            assert_eq!(config["config"]["Entrypoint"], json!(["/tortie"]));
            let layer = &content["layers"][0];
            assert_eq!(config["rootfs"]["diff_ids"], json!([layer["digest"]]));
            let files = tempfile::tempdir().unwrap();
            unpack(&blob(folder.path(), layer), files.path());
            assert_eq!(std::fs::read(files.path().join("tortie")).unwrap(), name.as_bytes());
            assert_eq!(std::fs::read(files.path().join("tortie-cni")).unwrap(), [7; 1000]);
            assert_eq!(std::fs::read_link(files.path().join("var/run")).unwrap().to_str(), Some("/run"));
            reached += 3;
        }
        assert_eq!(std::fs::read_dir(folder.path().join("blobs/sha256")).unwrap().count(), reached);
    }

    #[test]
    fn the_same_input_gives_the_same_bytes() {
        let digest_of = |name: &str, platforms: &[Platform]| Archive::new(name, platforms).unwrap();
        let (one, two) = (digest_of("t:1", &platforms()), digest_of("t:1", &platforms()));
        assert!(one.bytes == two.bytes);
        assert_eq!(one.digest, digest_of("t:2", &platforms()).digest, "a name is not part of the image");
        let mut other = platforms();
        other[1].programs[0].1.push(b'!');
        assert_ne!(one.digest, digest_of("t:1", &other).digest);
    }
}
