//! `tortie node diags`: what this node has, as an archive for bug reports. It works without an agent, because a bug may be
//! why there is none.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use tortie_agent::control::{Ask, ask};
use tortie_deploy::HEALTH_PORT;

use crate::archive::Archive;
use crate::output;

/// The folder in the archive.
const FOLDER: &str = "tortie-node-diags";
/// What the kernel shows about the network namespace of this process, and about the machine.
const PROC: [&str; 14] = [
    "net/arp",
    "net/dev",
    "net/fib_trie",
    "net/ipv6_route",
    "net/netstat",
    "net/route",
    "net/snmp",
    "net/sockstat",
    "net/softnet_stat",
    "net/stat/nf_conntrack",
    "meminfo",
    "modules",
    "sys/kernel/osrelease",
    "uptime",
];
/// Folders of kernel parameters.
const SYSCTLS: [&str; 4] = ["net/ipv4", "net/ipv6/conf", "net/netfilter", "net/core"];
/// Where the kubelet keeps the logs of containers: `NAMESPACE_POD_UID/CONTAINER/0.log`.
const LOGS: &str = "/var/log/pods";
/// The end of a log that is kept, in bytes.
const LOG_BYTES: u64 = 1 << 20;
/// How long a probe of the agent may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Words in the names of fields with secrets.
const SECRET: [&str; 6] = ["token", "password", "secret", "credential", "key", "auth"];

#[derive(clap::Args)]
pub(crate) struct NodeDiags {
    /// The archive, which must not exist; a tar file, compressed with gzip
    #[arg(short, long, value_name = "FILE", default_value = "tortie-node-diags.tar.gz")]
    output: PathBuf,
    /// The control socket of this node's agent
    #[arg(long, value_name = "PATH", default_value_os_t = tortie_cni::local::control_address())]
    agent_socket: PathBuf,
    /// Where the agent serves its health and metrics
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddr::from(([127, 0, 0, 1], HEALTH_PORT)))]
    health_address: SocketAddr,
    /// Where the container runtime looks for network configurations
    #[arg(long, value_name = "FOLDER", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,
    /// Where the plugin stores DEL calls while the agent is down
    #[arg(long, value_name = "FOLDER", default_value_os_t = tortie_cni::local::deletion_queue())]
    deletion_queue: PathBuf,
}

/// The files of the archive, and why others are not there.
#[derive(Default)]
struct Collected {
    files: BTreeMap<String, Vec<u8>>,
    missing: BTreeMap<String, String>,
}

impl NodeDiags {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let shown = self.output.display().to_string();
        // A file that exists is found before the work is done.
        let archive = Archive::create(&self.output, FOLDER).with_context(|| shown.clone())?;
        let mut collected = Collected::default();
        collected.kernel();
        collected.agent(&self.agent_socket, self.health_address);
        collected.cni(&self.cni_conf_dir, &self.deletion_queue);
        collected.logs(Path::new(LOGS));
        collected.write(archive).with_context(|| shown.clone())?;
        output::line(&format!("{shown} has {}", output::count(collected.files.len() as u64, "file")));
        for (name, why) in &collected.missing {
            output::error_line(&format!("note: {name} is missing: {why}"));
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Collected {
    fn add<E: std::fmt::Display>(&mut self, name: String, content: Result<Vec<u8>, E>) {
        match content {
            Ok(bytes) => drop(self.files.insert(name, bytes)),
            Err(error) => drop(self.missing.insert(name, error.to_string())),
        }
    }

    fn kernel(&mut self) {
        let config = tortie_linux::dataplane::Config::default();
        for (name, text) in tortie_linux::diagnostics(&config) {
            self.add(format!("network/{name}.txt"), text.map(String::into_bytes));
        }
        for name in PROC {
            let file = Path::new("/proc").join(name);
            // A kernel without a feature lacks its file.
            if file.exists() {
                self.add(format!("proc/{name}"), fs::read(file));
            }
        }
        for folder in SYSCTLS {
            let root = Path::new("/proc/sys").join(folder);
            let mut text = String::new();
            let walked = sysctls(&root, &mut text);
            self.add(format!("sysctl/{}.txt", folder.replace('/', "-")), walked.map(|()| text.into_bytes()));
        }
    }

    /// What the agent answers, if there is one.
    fn agent(&mut self, socket: &Path, health: SocketAddr) {
        for (name, question) in [
            ("log-level", Ask::LogLevel { new: None }),
            ("bgp-peers", Ask::BgpPeers),
            ("bgp-routes", Ask::BgpRoutes),
        ] {
            let answer = ask(socket, question).map_err(anyhow::Error::from);
            let answer = answer.and_then(|answer| Ok(serde_json::to_vec_pretty(&answer)?));
            self.add(format!("agent/{name}.json"), answer);
        }
        for path in ["healthz", "readyz", "metrics"] {
            self.add(format!("agent/{path}.txt"), probe(health, path));
        }
    }

    /// The configurations of the runtime, and the names of what the plugin has queued.
    fn cni(&mut self, folder: &Path, queue: &Path) {
        match names(folder) {
            Err(error) => drop(self.missing.insert(folder.display().to_string(), error.to_string())),
            Ok(files) => {
                for name in files {
                    let content = fs::read_to_string(folder.join(&name)).map(|text| without_secrets(&text));
                    self.add(format!("cni/{name}"), content.map(String::into_bytes));
                }
            }
        }
        // Without a call that was queued, there is no folder.
        if queue.exists() {
            let queued = names(queue).map(|names| names.join("\n").into_bytes());
            self.add("agent/queued-deletions.txt".to_owned(), queued);
        }
    }

    /// The ends of the logs of Tortie's containers.
    fn logs(&mut self, folder: &Path) {
        let Ok(pods) = names(folder) else {
            self.missing.insert("logs".to_owned(), format!("{} cannot be read", folder.display()));
            return;
        };
        for pod in pods.iter().filter(|pod| pod.starts_with(tortie_deploy::NAMESPACE)) {
            for container in names(&folder.join(pod)).unwrap_or_default() {
                for file in names(&folder.join(pod).join(&container)).unwrap_or_default() {
                    let content = end_of(&folder.join(pod).join(&container).join(&file));
                    self.add(format!("logs/{pod}/{container}/{file}"), content);
                }
            }
        }
    }

    fn write(&self, mut archive: Archive) -> io::Result<()> {
        let info = json!({
            "version": env!("CARGO_PKG_VERSION"), "time": jiff::Timestamp::now().to_string(),
            "node": std::env::var("NODENAME").ok(), "missing": self.missing,
        });
        archive.add_json("info.json", &info)?;
        for (name, bytes) in &self.files {
            archive.add(name, bytes)?;
        }
        archive.finish()
    }
}

/// The names in a folder, in order.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Adds the parameters below a folder, as `name = value`. Some can only be written.
fn sysctls(folder: &Path, text: &mut String) -> io::Result<()> {
    for name in names(folder)? {
        let path = folder.join(&name);
        if path.is_dir() {
            sysctls(&path, text)?;
        } else if let Ok(value) = fs::read_to_string(&path)
            && !SECRET.iter().any(|word| name.contains(word))
        {
            let name = path.strip_prefix("/proc/sys").unwrap_or(&path);
            text.push_str(&format!("{} = {}\n", name.display(), value.trim_end().replace('\n', ", ")));
        }
    }
    Ok(())
}

/// The answer of the agent's HTTP server.
fn probe(address: SocketAddr, path: &str) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, PROBE_TIMEOUT)?;
    stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

/// The last [`LOG_BYTES`] of a file.
fn end_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A configuration without the values of fields that may be secret. A file that is no JSON, such as a kubeconfig, is left
/// out as a whole.
fn without_secrets(text: &str) -> String {
    match serde_json::from_str::<Value>(text) {
        Ok(mut value) => {
            hide(&mut value);
            format!("{value:#}\n")
        }
        Err(_) => format!("left out: it is no JSON, and may have secrets ({} bytes)\n", text.len()),
    }
}

fn hide(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = name.to_lowercase();
                if SECRET.iter().any(|word| name.contains(word)) {
                    *value = json!("(left out)");
                } else {
                    hide(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_left_out() {
        let config = json!({"name": "n", "plugins": [
            {"type": "calico", "etcd_key_file": "/k", "policy": {"k8s_auth_token": "t0p"}, "kubernetes": {"kubeconfig": "/k"}},
        ]});
        let shown: Value = serde_json::from_str(&without_secrets(&config.to_string())).unwrap();
        let plugin = &shown["plugins"][0];
        assert_eq!((&shown["name"], &plugin["type"]), (&json!("n"), &json!("calico")));
        assert_eq!(plugin["policy"]["k8s_auth_token"], "(left out)");
        assert!(!without_secrets("users:\n- token: t0p\n").contains("t0p"));
        // A list of secrets has no names of its own.
        assert!(!without_secrets(r#"{"tokens": ["t0p"]}"#).contains("t0p"));
    }

    #[test]
    fn what_cannot_be_read_is_named_and_hides_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("logs/tortie-system_tortie-node-x_uid/agent")).unwrap();
        fs::create_dir_all(at("logs/default_other_uid/c")).unwrap();
        let long = vec![b'x'; LOG_BYTES as usize + 10];
        fs::write(at("logs/tortie-system_tortie-node-x_uid/agent/0.log"), [&b"first"[..], &long].concat())
            .unwrap();
        fs::write(at("logs/default_other_uid/c/0.log"), "theirs").unwrap();
        let mut collected = Collected::default();
        collected.logs(&at("logs"));
        collected.cni(&at("absent"), &at("absent"));
        let names: Vec<&str> = collected.files.keys().map(String::as_str).collect();
        assert_eq!(names, ["logs/tortie-system_tortie-node-x_uid/agent/0.log"]);
        assert_eq!(collected.files[names[0]].len() as u64, LOG_BYTES);
        assert_eq!(collected.missing.len(), 1);
        assert!(collected.missing.keys().all(|name| name.ends_with("absent")));
    }
}
