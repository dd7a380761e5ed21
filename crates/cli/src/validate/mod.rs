//! `tortie validate`: checks manifests without a cluster, for people and for CI systems.

mod sarif;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::ValueEnum;
use serde_json::{Value, json};
use tortie_api::manifest::{Object, Offline, Origin, Problem};
use tortie_api::{FieldError, Key, Kind, spelling, support};

use crate::checks::at;
use crate::explain::{DENIED, coloured};
use crate::filenames::{Filenames, Manifest};
use crate::junit::{self, Case, Suite};
use crate::lint::WARNING;
use crate::manifests::{is_of_default_tier, other_name, unknown_tiers};
use crate::output;

#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.required_unless_present("kustomize")))]
pub(crate) struct Validate {
    /// The output format
    #[arg(short, long, value_enum, default_value_t = ReportFormat::Text)]
    output: ReportFormat,
    #[command(flatten)]
    filenames: Filenames,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReportFormat {
    Text,
    Json,
    Junit,
    Sarif,
}

/// The kind of a problem. Its name is the rule's in SARIF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rule {
    /// The text is no manifest, or the object breaks a rule of its kind.
    Invalid,
    /// An object is given more than once.
    Duplicate,
    /// A policy names a tier that is not in the manifests.
    UnknownTier,
    /// Tortie refuses the field.
    Unsupported,
    /// The field has no effect in Tortie.
    WithoutEffect,
    /// Calico's API has the word in another case.
    Spelling,
}

impl Rule {
    const ALL: [Self; 6] = [
        Self::Invalid,
        Self::Duplicate,
        Self::UnknownTier,
        Self::Unsupported,
        Self::WithoutEffect,
        Self::Spelling,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Duplicate => "duplicate",
            Self::UnknownTier => "unknown-tier",
            Self::Unsupported => "unsupported",
            Self::WithoutEffect => "without-effect",
            Self::Spelling => "spelling",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Invalid => "The text is no manifest, or the object breaks a rule of its kind",
            Self::Duplicate => "The object is given more than once",
            Self::UnknownTier => "The policy names a tier that is not in the manifests",
            Self::Unsupported => "Tortie refuses the field",
            Self::WithoutEffect => "The field has no effect in Tortie",
            Self::Spelling => "Calico's API has the word in another case",
        }
    }

    /// Whether `tortie apply` refuses the object. A tier may exist in the cluster.
    fn is_error(self) -> bool {
        match self {
            Self::Invalid | Self::Duplicate | Self::Unsupported => true,
            Self::UnknownTier | Self::WithoutEffect | Self::Spelling => false,
        }
    }

    fn level(self) -> &'static str {
        if self.is_error() { "error" } else { "warning" }
    }
}

/// What was read, and its problems.
struct Report {
    files: Vec<String>,
    objects: usize,
    /// The number of objects of other kinds, by kind.
    skipped: BTreeMap<String, u64>,
    problems: Vec<(Rule, Problem)>,
}

impl Validate {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let report = Report::of(&self.filenames)?;
        match self.output {
            ReportFormat::Text => report.print(),
            ReportFormat::Json => output::line(&serde_json::to_string_pretty(&report.document())?),
            ReportFormat::Junit => output::text(&junit::documents(&report.suites())),
            ReportFormat::Sarif => output::line(&serde_json::to_string_pretty(&sarif::log(&report))?),
        }
        Ok(if report.count(true) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

impl Report {
    fn of(filenames: &Filenames) -> anyhow::Result<Self> {
        let (mut cluster, mut problems) = (Offline::strict(), Vec::new());
        let mut files = Vec::new();
        for Manifest { name, text } in filenames.manifests()? {
            let file = Path::new(&name);
            match text {
                Ok(text) => problems.extend(cluster.read(&name, &text).err().into_iter().flatten()),
                // A file that is named, and not there, is a mistake of the command line.
                Err(error) if !file.exists() && !file.is_symlink() => return Err(error),
                Err(error) => problems.push(Problem {
                    origin: Origin { file: name.clone(), line: 0 },
                    object: String::new(),
                    field: String::new(),
                    problem: format!("it cannot be read: {}", error.root_cause()),
                }),
            }
            files.push(name);
        }
        let mut problems: Vec<(Rule, Problem)> =
            problems.into_iter().map(|one| (of_reading(&one), one)).collect();
        let settled = cluster.settled();
        if settled.objects.is_empty()
            && settled.skipped.is_empty()
            && problems.is_empty()
            && !filenames.skip_empty
        {
            bail!("there are no objects in the manifests; --skip-empty allows that");
        }
        let objects = &settled.objects;
        problems.extend(objects.iter().flat_map(of_object));
        let keys: BTreeSet<&Key> = objects.iter().map(|object| &object.key).collect();
        let twice = objects.iter().filter(|object| object.key.name.starts_with("default."));
        let twice = twice.filter(|object| is_of_default_tier(&object.value));
        problems.extend(twice.filter_map(|object| {
            let other = other_name(&object.key).filter(|other| keys.contains(other))?;
            let problem = format!("{other} is the same policy: one of tier default has two names");
            Some((Rule::Duplicate, at(object, FieldError::new("metadata.name", problem))))
        }));
        problems.extend(unknown_tiers(std::iter::empty(), objects).map(|(object, tier)| {
            let problem = format!("tier {tier} is not in the manifests; the cluster must have it");
            (Rule::UnknownTier, at(object, FieldError::new("spec.tier", problem)))
        }));
        problems
            .sort_by(|(_, a), (_, b)| (&a.origin.file, a.origin.line).cmp(&(&b.origin.file, b.origin.line)));
        let mut skipped = BTreeMap::new();
        for one in &settled.skipped {
            *skipped.entry(one.kind.clone()).or_default() += 1;
        }
        // A workload counts as the pod that stands for it.
        Ok(Self { files, objects: objects.len(), skipped, problems })
    }

    /// The number of errors, or of warnings.
    fn count(&self, errors: bool) -> u64 {
        self.problems.iter().filter(|(rule, _)| rule.is_error() == errors).count() as u64
    }

    fn print(&self) {
        for (rule, Problem { origin, object, field, problem }) in &self.problems {
            let level = coloured(if rule.is_error() { DENIED } else { WARNING }, rule.level());
            let parts = [object, field, problem].into_iter().filter(|part| !part.is_empty());
            let text = parts.map(String::as_str).collect::<Vec<_>>().join(": ");
            output::line(&format!("{origin}: {level}[{}]: {}", rule.name(), output::shown(&text)));
        }
        let skipped: Vec<String> =
            self.skipped.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        if !skipped.is_empty() {
            output::line(&format!("not checked, because Tortie does not use them: {}", skipped.join(", ")));
        }
        let objects = output::count(self.objects as u64, "object");
        let files = output::count(self.files.len() as u64, "file");
        let (errors, warnings) =
            (output::count(self.count(true), "error"), output::count(self.count(false), "warning"));
        output::line(&format!("{objects} in {files}: {errors}, {warnings}"));
    }

    fn document(&self) -> Value {
        let one = |(rule, problem): &(Rule, Problem)| {
            let Problem { origin, object, field, problem } = problem;
            json!({"rule": rule.name(), "level": rule.level(), "file": origin.file, "line": origin.line,
                "object": object, "field": field, "problem": problem})
        };
        json!({"files": self.files, "objects": self.objects, "skipped": self.skipped,
            "problems": self.problems.iter().map(one).collect::<Vec<_>>()})
    }

    /// A suite for each file: the file itself, and what is wrong in it. Warnings fail no test.
    fn suites(&self) -> Vec<Suite> {
        let suite = |file: &String| {
            let of_file =
                self.problems.iter().filter(|(rule, one)| one.origin.file == *file && rule.is_error());
            let failed = of_file.map(|(rule, one)| Case {
                name: format!("{} {}", rule.name(), one.object).trim().to_owned(),
                line: Some(one.origin.line),
                failure: Some(if one.field.is_empty() {
                    one.problem.clone()
                } else {
                    format!("{}: {}", one.field, one.problem)
                }),
            });
            let mut cases: Vec<Case> = failed.collect();
            if cases.is_empty() {
                cases.push(Case { name: "valid".to_owned(), line: None, failure: None });
            }
            Suite { name: file.clone(), cases }
        };
        self.files.iter().map(suite).collect()
    }
}

/// The rule of a problem that the reader of manifests found.
fn of_reading(problem: &Problem) -> Rule {
    match problem.problem.contains("was given before") {
        true => Rule::Duplicate,
        false => Rule::Invalid,
    }
}

/// The fields that Tortie refuses, or that have no effect.
fn of_object(object: &Object) -> Vec<(Rule, Problem)> {
    let kind = object.key.kind;
    let refused = support::rejected(kind, &object.value).into_iter().map(|error| (Rule::Unsupported, error));
    let reported = support::reported(kind, &object.value).into_iter();
    let has_annotations = matches!(kind, Kind::Pod | Kind::Namespace);
    let annotation = has_annotations.then(|| support::unsupported_annotation(kind, &object.value)).flatten();
    let without_effect = reported.chain(annotation).map(|error| (Rule::WithoutEffect, error));
    // Of Calico's API, the reader refuses them.
    let spelling = spelling::check(kind, &object.value).into_iter().map(|error| (Rule::Spelling, error));
    refused.chain(without_effect).chain(spelling).map(|(rule, error)| (rule, at(object, error))).collect()
}
