//! The plugin: environment and standard input in, one document on standard output.
//!
//! While the agent is down, DEL is stored on disk and succeeds (the agent carries it out later), and every other
//! command fails with "try again later".

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs, io};

use ipnet::IpNet;
use serde_json::{Value, json};

use crate::ipam::{Delegation, IpamResult};
use crate::local;
use crate::transport::{self, Answer};
use crate::{Code, Command, Failure, Invocation, NetworkConfig, PrevResult, SUPPORTED_VERSIONS, Success};

/// How long to wait for the agent's answer: less than the four minutes after which a kubelet gives up.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// How long to wait for the agent's STATUS, which needs no other service.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The entry point.
#[must_use]
pub fn main() -> ExitCode {
    let mut config = Vec::new();
    let read = io::stdin().read_to_end(&mut config);
    let environment = |name: &str| env::var_os(name);
    let (document, code) = match read {
        Ok(_) => run(&environment, &config),
        Err(error) => {
            let failure = Failure::new(
                Code::IO,
                "cannot read the configuration from standard input",
                error.to_string(),
            );
            (Some(failure.document(SUPPORTED_VERSIONS[SUPPORTED_VERSIONS.len() - 1])), ExitCode::FAILURE)
        }
    };
    if let Some(document) = document
        && writeln!(io::stdout(), "{document}").is_err()
    {
        return ExitCode::FAILURE;
    }
    code
}

/// The environment of a call: the value of a variable.
type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Handles one call: returns the output and the exit code.
fn run(environment: Environment<'_>, config: &[u8]) -> (Option<Value>, ExitCode) {
    let newest = SUPPORTED_VERSIONS[SUPPORTED_VERSIONS.len() - 1];
    let invocation = match read_invocation(environment, config) {
        Ok(invocation) => invocation,
        Err(failure) => return (Some(failure.document(newest)), ExitCode::FAILURE),
    };
    let version = invocation.config.cni_version.clone();
    if invocation.command == Command::Version {
        let version = if version.is_empty() { newest } else { &version };
        return (
            Some(json!({"cniVersion": version, "supportedVersions": SUPPORTED_VERSIONS})),
            ExitCode::SUCCESS,
        );
    }
    let answer = PrevResult::read(&invocation.config.extra).and_then(|before| {
        check_prev_result(&invocation, before.as_ref())?;
        let path = variable(environment, "CNI_PATH")?;
        let (success, addressed) = carry_out(&invocation, config, &path)?;
        let mut document = success.map(|success| match before {
            Some(before) => before.followed_by(&success, &version),
            None => success.document(&version),
        });
        if let (Some(document), Some(addressed)) = (&mut document, addressed) {
            addressed.add_dns(document);
        }
        Ok(document)
    });
    match answer {
        Ok(document) => (document, ExitCode::SUCCESS),
        Err(failure) => (Some(failure.document(&version)), ExitCode::FAILURE),
    }
}

/// Carries out a call, with the IPAM plugin that the configuration names. The addresses come before everything else, and
/// go after everything else, so that no pod has them any more when they are free.
fn carry_out(
    invocation: &Invocation,
    config: &[u8],
    path: &str,
) -> Result<(Option<Success>, Option<IpamResult>), Failure> {
    let source = invocation.config.address_source()?;
    if !source.is_delegated() {
        return call(invocation).map(|success| (success, None));
    }
    let delegation = Delegation { source, call: invocation, text: config, path };
    let pod_cidrs = || pod_cidrs(invocation);
    match invocation.command {
        Command::Add => {
            let addressed = delegation.add(&pod_cidrs)?;
            let with_address = Invocation { delegated: addressed.addresses.clone(), ..invocation.clone() };
            match call(&with_address) {
                Ok(success) => Ok((success, Some(addressed))),
                Err(failure) => {
                    // The failure of the agent is the one to report. The runtime's DEL repeats this.
                    let _ = delegation.run(Command::Del);
                    Err(failure)
                }
            }
        }
        Command::Status => {
            call(invocation)?;
            delegation.status(&pod_cidrs).map(|()| (None, None))
        }
        command => {
            call(invocation)?;
            delegation.run(command).map(|()| (None, None))
        }
    }
}

/// The networks of the node's pods, which the agent knows.
fn pod_cidrs(invocation: &Invocation) -> Result<Vec<IpNet>, Failure> {
    let question = Invocation { command: Command::PodCidrs, ..invocation.clone() };
    let nets = call(&question)?.unwrap_or_default().ips;
    Ok(nets.iter().filter_map(|net| net.address.parse().ok()).collect())
}

/// ADD makes the interface, so no earlier plugin of the list may have made it. CHECK needs the result of ADD.
fn check_prev_result(invocation: &Invocation, before: Option<&PrevResult>) -> Result<(), Failure> {
    let interface = &invocation.interface;
    let exists = before.is_some_and(|before| before.has_interface(interface));
    match (invocation.command, before) {
        (Command::Add, _) if exists => Err(Failure::new(
            Code::NOT_SUPPORTED,
            format!(
                "an earlier plugin of network {} has made the interface {interface}",
                invocation.config.name
            ),
            "let tortie-cni be the first plugin of the list: it makes the pod's interface itself",
        )),
        (Command::Check, None) => Err(Failure::new(
            Code::INVALID_CONFIG,
            "CHECK needs prevResult",
            "the runtime passes the result of the pod's last ADD",
        )),
        (Command::Check, _) if !exists => {
            Err(Failure::new(Code::DIFFERS, format!("prevResult has no interface {interface}"), ""))
        }
        _ => Ok(()),
    }
}

fn call(invocation: &Invocation) -> Answer {
    let socket = &invocation.config.agent_socket;
    let patience = if invocation.command == Command::Status { STATUS_TIMEOUT } else { ANSWER_TIMEOUT };
    match transport::ask(socket, invocation, patience) {
        Ok(answer) => answer,
        Err(error) => {
            let why = format!("{}: {error}", socket.display());
            match invocation.command {
                Command::Del => enqueue(invocation, &why).map(|()| None),
                _ if transport::encode(invocation).is_err() => {
                    Err(Failure::new(Code::INVALID_CONFIG, "the configuration is too large", why))
                }
                Command::Status => Err(Failure::new(Code::NOT_AVAILABLE, "the agent does not answer", why)),
                _ => Err(Failure::new(Code::TRY_AGAIN_LATER, "the agent does not answer", why)),
            }
        }
    }
}

/// Stores a DEL for the agent. The file appears completely or not at all, and survives a power failure, because the
/// runtime considers the pod deleted and does not repeat the call.
fn enqueue(invocation: &Invocation, why: &str) -> Result<(), Failure> {
    let queue = &invocation.config.deletion_queue;
    let failed = |error: io::Error| {
        Failure::new(
            Code::TRY_AGAIN_LATER,
            "the agent does not answer, and the deletion cannot be kept for later",
            format!("{why}; {}: {error}", queue.display()),
        )
    };
    local::make_folder(queue).map_err(failed)?;
    // No id of a container contains a plus, so no two attachments share a name.
    let name = format!("{}+{}", invocation.container_id, invocation.interface);
    let text = serde_json::to_vec(invocation).map_err(|error| failed(error.into()))?;
    let unfinished = queue.join(format!(".{name}"));
    let kept = fs::File::create(&unfinished).and_then(|mut file| {
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&unfinished, queue.join(format!("{name}.json")))?;
        // Windows has no way to flush a folder: its file systems log the names of files.
        if cfg!(unix) { fs::File::open(queue)?.sync_all() } else { Ok(()) }
    });
    kept.map_err(failed)
}

/// The value of a variable, or nothing.
fn variable(environment: Environment<'_>, name: &str) -> Result<String, Failure> {
    environment(name).unwrap_or_default().into_string().map_err(|_| wrong(name, "is no UTF-8"))
}

fn wrong(variable: &str, why: &str) -> Failure {
    Failure::new(Code::INVALID_ENVIRONMENT, format!("{variable} {why}"), "")
}

pub(crate) fn read_invocation(environment: Environment<'_>, config: &[u8]) -> Result<Invocation, Failure> {
    let variable = |name: &str| variable(environment, name);
    let command = match variable("CNI_COMMAND")?.as_str() {
        "ADD" => Command::Add,
        "DEL" => Command::Del,
        "CHECK" => Command::Check,
        "GC" => Command::Gc,
        "STATUS" => Command::Status,
        "VERSION" => Command::Version,
        other => {
            return Err(wrong(
                "CNI_COMMAND",
                &format!("is {other:?}, not ADD, DEL, CHECK, GC, STATUS or VERSION"),
            ));
        }
    };
    let invocation = Invocation {
        command,
        container_id: variable("CNI_CONTAINERID")?,
        netns: variable("CNI_NETNS")?,
        interface: variable("CNI_IFNAME")?,
        args: read_args(&variable("CNI_ARGS")?)?,
        config: read_config(config, command)?,
        delegated: Vec::new(),
    };
    if matches!(command, Command::Add | Command::Del | Command::Check) {
        if !is_container_id(&invocation.container_id) {
            return Err(wrong("CNI_CONTAINERID", "must be letters, digits, dots, dashes and underscores"));
        }
        if !is_interface(&invocation.interface) {
            return Err(wrong(
                "CNI_IFNAME",
                "must be a name of 1 to 15 characters without slash, colon or blank",
            ));
        }
        if command != Command::Del && invocation.netns.is_empty() {
            return Err(wrong("CNI_NETNS", "is missing"));
        }
    }
    Ok(invocation)
}

fn read_config(text: &[u8], command: Command) -> Result<NetworkConfig, Failure> {
    let text = if text.trim_ascii().is_empty() && command == Command::Version { b"{}" } else { text };
    let config: NetworkConfig = serde_json::from_slice(text).map_err(|error| {
        Failure::new(Code::DECODING, "the configuration on standard input cannot be read", error.to_string())
    })?;
    if command != Command::Version && !SUPPORTED_VERSIONS.contains(&config.cni_version.as_str()) {
        let msg = format!("cniVersion {:?} is not supported", config.cni_version);
        return Err(Failure::new(
            Code::INCOMPATIBLE_VERSION,
            msg,
            format!("use one of {}", SUPPORTED_VERSIONS.join(", ")),
        ));
    }
    if command != Command::Version && config.name.is_empty() {
        return Err(Failure::new(Code::INVALID_CONFIG, "the configuration has no name", ""));
    }
    Ok(config)
}

fn read_args(text: &str) -> Result<BTreeMap<String, String>, Failure> {
    let pairs = text.split(';').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').ok_or_else(|| {
                Failure::new(
                    Code::INVALID_ENVIRONMENT,
                    format!("CNI_ARGS has {pair:?}, which is no NAME=VALUE"),
                    "",
                )
            })?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

fn is_container_id(id: &str) -> bool {
    id.starts_with(|first: char| first.is_ascii_alphanumeric())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

fn is_interface(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.contains(|each: char| each == '/' || each == ':' || each.is_whitespace())
        // It becomes part of the name of a file.
        && !(cfg!(windows) && name.contains(['\\', '*', '?', '"', '<', '>', '|']))
}

#[cfg(test)]
#[cfg(unix)]
mod damaged;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;
    use proptest::sample::{Index, select};
    use serde_json::Map;

    use super::*;
    use crate::transport::encode;

    /// Any JSON, with the names that the plugin reads.
    fn json() -> impl Strategy<Value = Value> {
        let names = select(vec![
            "address",
            "interface",
            "sandbox",
            "name",
            "ips",
            "interfaces",
            "routes",
            "dns",
            "x",
        ]);
        let texts = select(vec!["", "eth0", "10.0.0.1/32", "/", "\u{0}", "é", "1.1.0", "/run/netns/x"]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            texts.prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            prop_oneof![
                vec(inner.clone(), 0..4).prop_map(Value::from),
                btree_map(names.clone().prop_map(str::to_owned), inner, 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    /// The value of a variable: mostly one of these, and sometimes any text.
    fn variable(usual: &[&'static str]) -> impl Strategy<Value = String> {
        prop_oneof![9 => select(usual.to_vec()).prop_map(str::to_owned), 1 => "\\PC{0,20}"]
    }

    fn variables() -> impl Strategy<Value = Vec<String>> {
        let command = variable(&["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"]);
        let args = variable(&["", "K8S_POD_NAME=p;K8S_POD_NAMESPACE=n", ";=;"]);
        let all =
            (command, variable(&["c1"]), variable(&["/run/netns/x", ""]), variable(&["eth0", "net1"]), args);
        all.prop_map(|(command, container, netns, interface, args)| {
            vec![command, container, netns, interface, args]
        })
    }

    /// Where no file and no socket can be.
    const NOWHERE: &str = "/dev/null/tortie";

    #[test]
    fn any_call_gets_a_document_and_an_exit_code() {
        let keys = vec![
            "cniVersion",
            "name",
            "type",
            "prevResult",
            "runtimeConfig",
            "ipam",
            "cni.dev/valid-attachments",
        ];
        let config = btree_map(select(keys), json(), 0..5);
        let cut = prop_oneof![4 => Just(None), 1 => any::<Index>().prop_map(Some)];
        let answers = Cell::new([0; 2]);
        let input = (variables(), config, cut);
        let test = |(variables, config, cut): (Vec<String>, BTreeMap<&str, Value>, Option<Index>)| {
            let mut config = Value::Object(Map::from_iter(
                config.into_iter().map(|(name, value)| (name.to_owned(), value)),
            ));
            // Most calls get past the version and the name.
            config["cniVersion"] = if config["cniVersion"] == Value::Null {
                json!("1.1.0")
            } else {
                config["cniVersion"].take()
            };
            config["name"] = if config["name"] == Value::Null { json!("net") } else { config["name"].take() };
            config["agentSocket"] = json!(NOWHERE);
            config["deletionQueue"] = json!(NOWHERE);
            let mut bytes = config.to_string();
            if let Some(cut) = cut {
                let end = bytes.floor_char_boundary(cut.index(bytes.len() + 1));
                bytes.truncate(end);
            }
            let names = ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"];
            let environment = |name: &str| {
                let index = names.iter().position(|other| *other == name)?;
                Some(OsString::from(&variables[index]))
            };
            let (document, code) = run(&environment, bytes.as_bytes());
            let has_failed = code != ExitCode::SUCCESS;
            prop_assert!(
                !has_failed || document.is_some_and(|document| document["code"].is_u64()),
                "{bytes}"
            );
            // What the agent reads from its socket.
            if let Ok(call) = read_invocation(&environment, bytes.as_bytes()) {
                let message = encode(&call).expect("it is small");
                let read: Invocation = serde_json::from_slice(&message[4..]).expect("what was written");
                prop_assert_eq!(read.command, call.command);
                answers.set([answers.get()[0] + 1, answers.get()[1]]);
            } else {
                answers.set([answers.get()[0], answers.get()[1] + 1]);
            }
            Ok(())
        };
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        proptest::test_runner::TestRunner::new(config).run(&input, test).expect("no call panics");
        assert!(answers.get().iter().all(|count| *count > 10), "{answers:?}");
    }
}
