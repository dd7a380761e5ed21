//! Connections between pods of the cluster, compared with what policy allows.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;

use anyhow::{Context as _, Result, bail};
use tortie_servers::cluster::image::AGNHOST;

use super::{kubectl, kubectl_command, wait_until};

/// The verdicts as the lab's probes name them.
pub(super) const REACHED: &str = "Reached";
pub(super) const CUT: &str = "Cut";
/// How long a client on a Linux node waits for an answer, in seconds.
const PATIENCE: &str = "2";
/// curl's exit code for a time that has passed.
const TIMED_OUT: &str = "28";
/// How often the verdicts are compared again when they are as they should be.
const ROUNDS: usize = 1;
/// Policies among the pods `a`, `b` and `closed`.
const POLICIES: &str = include_str!("policies.yaml");

/// Where a pod connects to, and the pod that must answer.
pub(super) struct Target {
    pub(super) name: String,
    pub(super) to: SocketAddrV4,
    pub(super) pod: String,
}

/// Connects from a pod to targets.
pub(super) type Verdicts<'a> = dyn FnMut(&str, &[&Target]) -> Result<Vec<String>> + 'a;

/// Waits until all verdicts are as expected, and demands that they stay so.
pub(super) fn settle(
    clients: &[&str],
    targets: &[Target],
    verdicts: &mut Verdicts<'_>,
    is_allowed: &dyn Fn(&str, &Target) -> bool,
) -> Result<()> {
    let mut compare = || -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for from in clients {
            // A Service does not lead back to its own client everywhere.
            let others: Vec<&Target> = targets.iter().filter(|target| target.pod != *from).collect();
            for (target, verdict) in others.iter().zip(verdicts(from, &others)?) {
                let expected = if is_allowed(from, target) { REACHED } else { CUT };
                if verdict != expected {
                    wrong.push(format!(
                        "{from} -> {} ({}): {verdict}, not {expected}",
                        target.name, target.to
                    ));
                }
            }
        }
        Ok(wrong)
    };
    let mut wrong = Vec::new();
    let settled = wait_until("the verdicts are as they should be", || {
        wrong = compare()?;
        Ok(wrong.is_empty())
    });
    settled.with_context(|| format!("wrong verdicts:\n{}", wrong.join("\n")))?;
    for _ in 0..ROUNDS {
        let wrong = compare()?;
        if !wrong.is_empty() {
            bail!("verdicts were right, and are wrong now:\n{}", wrong.join("\n"));
        }
    }
    Ok(())
}

/// What the policies allow: the servers `b` accept only the clients `a`; the pods `closed` may connect to nobody and accept
/// anybody.
pub(super) fn allowed(from: &str, to: &str) -> bool {
    from == to || (!from.ends_with("closed") && (!to.ends_with("-b") || from.ends_with("-a")))
}

/// Puts the policies into force in a namespace.
pub(super) fn apply_policies(namespace: &str) -> Result<()> {
    apply(&POLICIES.replace("NAMESPACE", namespace))
}

/// Removes the policies from a namespace.
pub(super) fn delete_policies(namespace: &str) -> Result<()> {
    delete(&POLICIES.replace("NAMESPACE", namespace))
}

/// Connects from a pod of a Linux node to all targets at once. Each page must name the pod that serves it.
pub(super) fn by_curl(namespace: &str, from: &str, targets: &[&Target]) -> Result<Vec<String>> {
    let script = format!(
        "for to in \"$@\"; do
             (page=$(curl --silent --show-error --max-time {PATIENCE} http://$to/ 2>&1); echo $to $? $page) & done; wait"
    );
    let namespace = format!("--namespace={namespace}");
    let mut arguments = vec!["exec", from, &namespace, "--", "sh", "-c", &script, "sh"];
    let addresses: Vec<String> = targets.iter().map(|target| target.to.to_string()).collect();
    arguments.extend(addresses.iter().map(String::as_str));
    let output = kubectl_command(&arguments)?.output()?;
    if !output.status.success() {
        bail!("{from} cannot try connections: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let results: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    let verdict = |(target, address): (&&Target, &String)| match results.get(address.as_str()) {
        Some(result) => match result.split_once(' ').unwrap_or((result, "")) {
            ("0", page) if page.contains(&target.pod) => REACHED.to_owned(),
            ("0", page) => format!("another page: {page:?}"),
            (TIMED_OUT, _) => CUT.to_owned(),
            (_, problem) => problem.to_owned(),
        },
        None => format!("no answer of the client: {text:?}"),
    };
    Ok(targets.iter().zip(&addresses).map(verdict).collect())
}

/// Objects of a namespace, with these fields.
pub(super) fn table(namespace: &str, kind: &str, fields: &str) -> Result<Vec<Vec<String>>> {
    let template = format!("jsonpath={{range .items[*]}}{fields}{{\"\\n\"}}{{end}}");
    // The fields in the template are separated by blanks.
    let template = template.replace("} {", "}{\" \"}{");
    let namespace = format!("--namespace={namespace}");
    let output = kubectl_command(&["get", kind, &namespace, "-o", &template])?.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let width = fields.split(' ').count();
    let rows: Vec<Vec<String>> =
        text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect();
    if !output.status.success() || rows.is_empty() || rows.iter().any(|row: &Vec<String>| row.len() != width)
    {
        bail!("kubectl get {kind}: {text:?} {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(rows)
}

pub(super) fn apply(text: &str) -> Result<()> {
    with_file(text, |file| kubectl(&["apply", "--filename", file]))
}

pub(super) fn delete(text: &str) -> Result<()> {
    with_file(text, |file| kubectl(&["delete", "--ignore-not-found", "--filename", file, "--timeout=120s"]))
}

/// Writes a manifest to a file, and uses it.
pub(super) fn with_file<T>(text: &str, work: impl FnOnce(&str) -> Result<T>) -> Result<T> {
    let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    std::fs::write(file.path(), text.replace("AGNHOST", AGNHOST))?;
    work(&file.path().display().to_string())
}
