//! What the hub has of a model: a commit, and its files with sizes and checksums.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use weights::hub::{HubName, is_commit, is_inside};

use crate::client::{HubClient, header};
use crate::error::{HubError, Result};

/// Chosen: a list of files is some hundred bytes for each; a settings file is far smaller.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Chosen: models have hundreds of files, large datasets some ten thousand.
const MOST_FILES: usize = 100_000;
const MOST_PAGES: usize = 1000;

/// A model at a commit.
#[derive(Clone, Debug)]
pub struct HubModel {
    /// As it was asked for.
    pub name: HubName,
    /// `OWNER/NAME`.
    pub repo: String,
    /// The commit.
    pub commit: String,
    /// All its files.
    pub files: Vec<RemoteFile>,
}

/// A file of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// In the snapshot; it stays there.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Tells whether it came whole.
    pub checksum: FileChecksum,
}

/// How a file is checked, and what its blob is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChecksum {
    /// SHA-256 of a large file (LFS).
    Sha256(String),
    /// Git's name of a small one: SHA-1 with its length before it.
    GitSha1(String),
}

impl FileChecksum {
    /// As hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitSha1(hex) => hex,
        }
    }
}

/// What `/api/models/NAME/revision/REVISION` says.
#[derive(Deserialize)]
struct RevisionAnswer {
    sha: String,
}

/// What `/api/models/NAME/tree/COMMIT` says of each file or folder.
#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<LfsEntry>,
}

#[derive(Deserialize)]
struct LfsEntry {
    oid: String,
    size: u64,
}

impl HubModel {
    /// Asks for a model.
    pub fn find(client: &HubClient, name: &HubName) -> Result<Self> {
        let repo = format!("{}/{}", name.owner, name.name);
        let revision = name.revision();
        let commit = if is_commit(revision) {
            revision.to_owned()
        } else {
            let url = client.url(&format!("api/models/{repo}/revision/{revision}"));
            let found: std::result::Result<RevisionAnswer, _> =
                json(client, &repo, &url).map(|(answer, _)| answer);
            found.map_err(|error| named(error, revision))?.sha
        };
        if !is_commit(&commit) {
            return Err(client.answer(format!(
                "its commit is {:?}",
                commit.chars().take(60).collect::<String>()
            )));
        }
        let files = files(client, &repo, &commit).map_err(|error| named(error, revision))?;
        Ok(Self { name: name.clone(), repo, commit, files })
    }

    /// The file of that path.
    pub fn file(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The address of a file.
    pub(crate) fn url(&self, client: &HubClient, file: &RemoteFile) -> String {
        client.url(&format!("{}/resolve/{}/{}", self.repo, self.commit, file.path))
    }

    /// The whole of a small file.
    pub fn read(&self, client: &HubClient, file: &RemoteFile) -> Result<Vec<u8>> {
        let mut response = client.get(&self.repo, &self.url(client, file), None)?;
        let body = response.body_mut().with_config().limit(LONGEST_ANSWER).read_to_vec();
        body.map_err(|error| client.answer(format!("{}: {error}", file.path)))
    }
}

/// The revision that was asked for, which the client does not know.
fn named(error: HubError, revision: &str) -> HubError {
    match error {
        HubError::NoSuchRevision { name, .. } => {
            HubError::NoSuchRevision { name, revision: revision.into() }
        }
        error => error,
    }
}

/// An answer in JSON, and the address of its next page.
fn json<T: DeserializeOwned>(
    client: &HubClient,
    repo: &str,
    url: &str,
) -> Result<(T, Option<String>)> {
    let mut response = client.get(repo, url, None)?;
    let next = header(&response, "link").and_then(|link| next_page(&link));
    let body = response.body_mut().with_config().limit(LONGEST_ANSWER).read_to_vec();
    let body = body.map_err(|error| client.answer(error.to_string()))?;
    let parsed = serde_json::from_slice(&body).map_err(|error| client.answer(error.to_string()))?;
    Ok((parsed, next))
}

/// `<https://…?cursor=…>; rel="next"`
fn next_page(link: &str) -> Option<String> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

fn files(client: &HubClient, repo: &str, commit: &str) -> Result<Vec<RemoteFile>> {
    let mut url = client.url(&format!("api/models/{repo}/tree/{commit}")) + "?recursive=true";
    let mut files = Vec::new();
    for _ in 0..MOST_PAGES {
        let (entries, next): (Vec<TreeEntry>, _) = json(client, repo, &url)?;
        for entry in entries.into_iter().filter(|entry| entry.kind == "file") {
            files.push(checked(client, entry)?);
        }
        if files.len() > MOST_FILES {
            break;
        }
        let Some(next) = next else { return Ok(files) };
        if !client.is_own(&next) {
            return Err(client.answer("the list of files goes on at another server".into()));
        }
        url = next;
    }
    Err(client.answer(format!("more than {MOST_FILES} files, or {MOST_PAGES} pages of them")))
}

/// A file as the server has it, unless its name or checksum could lead somewhere else.
fn checked(client: &HubClient, entry: TreeEntry) -> Result<RemoteFile> {
    let TreeEntry { path, oid, size, lfs, .. } = entry;
    if !is_inside(&path) {
        return Err(HubError::FileName { path: path.chars().take(200).collect() });
    }
    let (bytes, checksum, digits) = match lfs {
        Some(LfsEntry { oid, size }) => (size, FileChecksum::Sha256(oid), 64),
        None => (size, FileChecksum::GitSha1(oid), 40),
    };
    let is_hex =
        checksum.hex().bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if checksum.hex().len() != digits || !is_hex {
        let shown: String = checksum.hex().chars().take(80).collect();
        return Err(client.answer(format!(
            "the checksum of {path} is {shown:?}, expected {digits} hexadecimal digits"
        )));
    }
    Ok(RemoteFile { path, bytes, checksum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_followed_by_their_link() {
        let link = r#"<https://a/b?cursor=x>; rel="next", <https://a/c>; rel="last""#;
        assert_eq!(next_page(link).as_deref(), Some("https://a/b?cursor=x"));
        assert_eq!(next_page(r#"<https://a/c>; rel="prev""#), None);
        assert_eq!(next_page(r#"rel="next""#), None);
    }
}
