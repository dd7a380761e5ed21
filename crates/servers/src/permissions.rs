//! The permissions that a role grants, and those that a user's requests needed, by the API server's audit log.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{io, write};
use crate::{Error, KubeApi};

const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
";

/// How long to wait for the last lines of the log.
const PATIENCE: Duration = Duration::from_secs(20);

/// Group, resource with subresource, verb.
pub type Permission = (String, String, String);

/// The log of all requests to an API server.
pub struct AuditLog {
    policy: PathBuf,
    log: PathBuf,
}

/// What the requests of a user needed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Requested {
    /// The permissions that the user has.
    pub used: BTreeSet<Permission>,
    /// The permissions that the user lacks.
    pub refused: BTreeSet<Permission>,
}

impl AuditLog {
    /// A log in this folder.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    pub fn new(folder: &Path) -> Result<Self, Error> {
        let audit = Self { policy: folder.join("policy.yaml"), log: folder.join("audit.log") };
        write(&audit.policy, AUDIT_POLICY)?;
        Ok(audit)
    }

    /// The flags of the API server that writes it.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        vec![
            format!("--audit-policy-file={}", self.policy.display()),
            format!("--audit-log-path={}", self.log.display()),
        ]
    }

    /// What the requests of this user needed so far.
    ///
    /// # Errors
    ///
    /// The log cannot be read.
    pub fn requested(&self, user: &str) -> Result<Requested, Error> {
        let mut requested = Requested::default();
        let text = std::fs::read_to_string(&self.log).map_err(io("reading the audit log"))?;
        // The last line may be incomplete.
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for event in events {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let object = &event["objectRef"];
            if event["user"]["username"] != user || object.is_null() {
                continue;
            }
            let resource = match object["subresource"].as_str() {
                Some(part) => format!("{}/{part}", text(&object["resource"])),
                None => text(&object["resource"]),
            };
            let permission = (text(&object["apiGroup"]), resource, text(&event["verb"]));
            match event["responseStatus"]["code"].as_u64() {
                Some(403) => requested.refused.insert(permission),
                _ => requested.used.insert(permission),
            };
        }
        Ok(requested)
    }

    /// What differs between the requests of this user and these permissions, one sentence for each permission. Waits until
    /// all are used.
    ///
    /// # Errors
    ///
    /// The log cannot be read.
    pub fn differences(&self, user: &str, granted: &BTreeSet<Permission>) -> Result<Vec<String>, Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Requested { used, refused } = self.requested(user)?;
            if used.is_superset(granted) || Instant::now() > deadline {
                let unused = granted.difference(&used).map(|it| format!("{it:?} is granted and not used"));
                let others = used.difference(granted).map(|it| format!("{it:?} is granted by another role"));
                let refused = refused.iter().map(|it| format!("{it:?} is refused"));
                return Ok(unused.chain(others).chain(refused).collect());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl KubeApi {
    /// The permissions of a role: the arguments of `kubectl get` select it.
    ///
    /// # Errors
    ///
    /// There is no such role.
    pub fn granted(&self, role: &[&str]) -> Result<BTreeSet<Permission>, Error> {
        let text = self.kubectl(&[&["get", "-o", "json"], role].concat())?;
        let role: Value = serde_json::from_str(&text).unwrap_or_default();
        let words = |value: &Value| -> Vec<String> {
            let words = value.as_array().into_iter().flatten();
            words.filter_map(|word| word.as_str().map(str::to_owned)).collect()
        };
        let mut granted = BTreeSet::new();
        for rule in role["rules"].as_array().into_iter().flatten() {
            for group in words(&rule["apiGroups"]) {
                for resource in words(&rule["resources"]) {
                    let verbs = words(&rule["verbs"]).into_iter();
                    granted.extend(verbs.map(|verb| (group.clone(), resource.clone(), verb)));
                }
            }
        }
        Ok(granted)
    }

    /// Lets a user do what a ClusterRole allows.
    ///
    /// # Errors
    ///
    /// The API server rejects it.
    pub fn bind(&self, user: &str, role: &str) -> Result<String, Error> {
        self.apply(&binding(user, role))
    }
}

/// The manifest of a ClusterRole with these permissions, and of its binding to the user of the same name.
#[must_use]
pub fn role<'a>(user: &str, permissions: impl Iterator<Item = &'a Permission>) -> String {
    let rules: Vec<Value> = permissions
        .map(
            |(group, resource, verb)| json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]}),
        )
        .collect();
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: {user}}}
rules: {}
---
{}---
",
        Value::Array(rules),
        binding(user, user)
    )
}

fn binding(user: &str, role: &str) -> String {
    format!(
        "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: of-{user}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {role}}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {user}}}]
"
    )
}

/// The definition of a kind of cluster policies with these versions, without its schema.
#[must_use]
pub fn cluster_policies(plural: &str, versions: &[&str]) -> String {
    let kind = plural.replace("policies", "policy");
    let schema = "{openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}";
    let versions = versions.iter().enumerate().map(|(number, version)| {
        format!("  - {{name: {version}, served: true, storage: {}, schema: {schema}}}\n", number == 0)
    });
    format!(
        "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {plural}.policy.networking.k8s.io
  annotations: {{api-approved.kubernetes.io: unapproved}}
spec:
  group: policy.networking.k8s.io
  scope: Cluster
  names: {{kind: {kind}, plural: {plural}}}
  versions:
{}---
",
        versions.collect::<String>()
    )
}
