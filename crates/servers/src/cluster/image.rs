//! OCI archives of images for tests, which cannot be downloaded there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{io, write};
use crate::programs::Program;
use crate::{Error, programs};

/// The image that Kubernetes' suites run in pods, as the suite of this version names it.
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// The name of the same image in the conformance suite of ClusterNetworkPolicy.
const AGNHOST_OF_POLICY: &str = "registry.k8s.io/e2e-test-images/agnhost:2.45";
/// An image with a shell, as the suite names it; here the same as [`AGNHOST`].
pub const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1";
/// The image of the DNS, in `tests/coredns/cluster.yaml`.
const COREDNS: &str = "tortie.test/coredns:1";
/// The image of a pod's sandbox.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";

/// The shell and its companions, which the suites run in agnhost.
const SHELL: &str = "/bin/busybox";

/// Writes the archives of [`AGNHOST`] with [`BUSYBOX`], [`PAUSE`] and the DNS to this folder, and returns their files.
///
/// # Errors
///
/// A program is missing, or a file cannot be written.
pub fn write_test_images(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let agnhost = Program::Agnhost.find()?;
    let busybox = Program::Busybox.find()?;
    let commands = programs::run({
        let mut list = Command::new(&busybox);
        list.arg("--list");
        list
    })?;
    let mut shell = vec![
        Entry::File("agnhost", agnhost.clone()),
        Entry::File(&SHELL[1..], busybox),
        Entry::Text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        Entry::Text("etc/group", "root:x:0:\n"),
        Entry::Folder("tmp"),
        Entry::Folder("uploads"),
    ];
    // The suites run these in agnhost. Their libraries serve busybox, too, which loads them to look names up.
    let mut dynamic = with_libraries(&Program::Curl.find()?)?;
    dynamic.extend(with_libraries(Path::new("/bin/bash"))?);
    let netcat = Program::Netcat.find()?;
    dynamic.extend(with_libraries(&netcat)?);
    dynamic.extend(with_libraries(&Program::Wget.find()?)?);
    // busybox has neither `nc -z` nor `nc -u`, its `wget -T` crashes in Debian 12, and its shell prefers its own commands.
    shell.push(Entry::File("bin/nc", netcat));
    shell.push(Entry::Link("sh", "/bin/bash"));
    shell.extend(dynamic.iter().map(|file| Entry::File(file.trim_start_matches('/'), PathBuf::from(file))));
    shell.extend(
        commands
            .lines()
            .filter(|name| !["busybox", "nc", "sh", "wget"].contains(name))
            .map(|name| Entry::Link(name, SHELL)),
    );
    let dns = [Entry::File("coredns", Program::CoreDns.find()?)];
    let pause = [Entry::File("agnhost", agnhost)];
    Ok(vec![
        archive(folder, &[AGNHOST, AGNHOST_OF_POLICY, BUSYBOX], &shell, &["/agnhost"], &["pause"])?,
        archive(folder, &[COREDNS], &dns, &["/coredns"], &[])?,
        archive(folder, &[PAUSE], &pause, &["/agnhost", "pause"], &[])?,
    ])
}

/// A program and the libraries that it loads, by their absolute paths.
fn with_libraries(program: &Path) -> Result<Vec<String>, Error> {
    let mut command = Command::new("ldd");
    command.arg(program);
    let libraries = programs::run(command)?;
    // `name => /path (address)`, or `/path (address)` for the loader.
    let paths = libraries.lines().filter_map(|line| {
        let path = line.split(" => ").last()?.split_whitespace().next()?;
        path.starts_with('/').then(|| path.to_owned())
    });
    Ok(paths.chain([program.display().to_string()]).collect())
}

/// A part of an image. Paths are relative to its root.
enum Entry<'a> {
    File(&'a str, PathBuf),
    Text(&'a str, &'a str),
    Folder(&'a str),
    /// A command in `/bin`, and the program that it is a name of.
    Link(&'a str, &'a str),
}

/// Writes the archive of an image with one layer and at least one name.
fn archive(
    folder: &Path,
    names: &[&str],
    entries: &[Entry<'_>],
    entrypoint: &[&str],
    command: &[&str],
) -> Result<PathBuf, Error> {
    let temporary = tempfile::tempdir_in(folder).map_err(io("creating a folder for an image"))?;
    let (root, layout) = (temporary.path().join("root"), temporary.path().join("layout"));
    for entry in entries {
        add(&root, entry)?;
    }
    let layer = temporary.path().join("layer.tar");
    tar(&root, &layer)?;
    let blobs = layout.join("blobs/sha256");
    create_folder(&blobs)?;
    let layer = fs::read(&layer).map_err(io("reading the layer of an image"))?;
    let layer = blob(&blobs, "application/vnd.oci.image.layer.v1.tar", &layer)?;
    let configuration = json!({
        "architecture": architecture(), "os": "linux",
        "config": {
            "Entrypoint": entrypoint, "Cmd": command,
            "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "WorkingDir": "/",
        },
        // An uncompressed layer has the same digest in both places.
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    });
    let configuration = document(&blobs, "application/vnd.oci.image.config.v1+json", &configuration)?;
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": manifest_type, "config": configuration, "layers": [layer],
    });
    let manifest = document(&blobs, manifest_type, &manifest)?;
    let named = names.iter().map(|name| {
        let mut manifest = manifest.clone();
        manifest["annotations"] = json!({"io.containerd.image.name": name});
        manifest
    });
    let index = json!({"schemaVersion": 2, "manifests": named.collect::<Vec<_>>()});
    write(&layout.join("index.json"), &index.to_string())?;
    write(&layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let name = names.first().copied().unwrap_or_default();
    let short = name.rsplit('/').next().unwrap_or(name).split(':').next().unwrap_or(name);
    let file = folder.join(format!("{short}.tar"));
    tar(&layout, &file)?;
    Ok(file)
}

fn add(root: &Path, entry: &Entry<'_>) -> Result<(), Error> {
    let (Entry::File(path, _) | Entry::Text(path, _) | Entry::Folder(path) | Entry::Link(path, _)) = entry;
    let failed = || io(format!("adding {path} to an image"));
    let target = if matches!(entry, Entry::Link(..)) { root.join("bin").join(path) } else { root.join(path) };
    create_folder(target.parent().unwrap_or(root))?;
    match entry {
        Entry::File(_, source) => fs::copy(source, &target).map(|_| ()).map_err(failed()),
        Entry::Text(_, text) => write(&target, text),
        Entry::Folder(_) => create_folder(&target),
        Entry::Link(_, program) => symlink(program, &target).map_err(failed()),
    }
}

fn create_folder(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(io(format!("creating {}", path.display())))
}

/// Archives a folder, so that equal contents are equal archives.
fn tar(folder: &Path, file: &Path) -> Result<(), Error> {
    let mut command = Command::new("tar");
    command.args(["--create", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]);
    command.arg("--file").arg(file).arg("--directory").arg(folder).arg(".");
    programs::run(command).map(|_| ())
}

fn document(blobs: &Path, media_type: &str, document: &Value) -> Result<Value, Error> {
    blob(blobs, media_type, document.to_string().as_bytes())
}

/// Writes a blob and returns its descriptor.
fn blob(blobs: &Path, media_type: &str, content: &[u8]) -> Result<Value, Error> {
    let digest: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(blobs.join(&digest), content).map_err(io("writing a part of an image"))?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()}))
}

/// This machine's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_names_its_image_and_the_digest_of_every_part() {
        let folder = tempfile::tempdir().unwrap();
        let entries =
            [Entry::Text("etc/passwd", "root"), Entry::Folder("tmp"), Entry::Link("sh", "/bin/busybox")];
        let names = ["example.org/tests/small:1.0", "example.org/tests/small:2.0"];
        let write = || archive(folder.path(), &names, &entries, &["/sh"], &["-l"]);
        let file = write().unwrap();
        assert_eq!(file.file_name().unwrap(), "small.tar");
        let first = fs::read(&file).unwrap();
        write().unwrap();
        assert_eq!(fs::read(&file).unwrap(), first, "equal contents are another archive");

        let layout = folder.path().join("layout");
        extract(&file, &layout);
        let read = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let content = fs::read(layout.join("blobs/sha256").join(digest)).unwrap();
            let actual: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(actual, digest);
            assert_eq!(descriptor["size"], content.len());
            content
        };
        let parse = |content: &[u8]| serde_json::from_slice::<Value>(content).unwrap();
        let index = parse(&fs::read(layout.join("index.json")).unwrap());
        let manifest = &index["manifests"][0];
        for (number, name) in names.iter().enumerate() {
            let named = &index["manifests"][number];
            assert_eq!(named["annotations"]["io.containerd.image.name"], *name);
            assert_eq!(named["digest"], manifest["digest"]);
        }
        let manifest = parse(&read(manifest));
        let configuration = parse(&read(&manifest["config"]));
        assert_eq!(configuration["config"]["Entrypoint"], json!(["/sh"]));
        assert_eq!(configuration["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);

        let (layer, root) = (folder.path().join("layer.tar"), folder.path().join("root"));
        fs::write(&layer, read(&manifest["layers"][0])).unwrap();
        extract(&layer, &root);
        assert_eq!(fs::read_link(root.join("bin/sh")).unwrap(), Path::new("/bin/busybox"));
        assert_eq!(fs::read_to_string(root.join("etc/passwd")).unwrap(), "root");
    }

    fn extract(file: &Path, folder: &Path) {
        fs::create_dir(folder).unwrap();
        let mut command = Command::new("tar");
        command.arg("--extract").arg("--file").arg(file).arg("--directory").arg(folder);
        programs::run(command).unwrap();
    }
}
