//! Opens files that have to be plain ones. Where hearth looks for a file of its own there may be a link, which would
//! lead a write elsewhere, or a pipe, whose opening waits for ever; both are errors here.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a file of hearth's own as the options say. A link is refused.
pub fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open(path, options, OFlags::NOFOLLOW)
}

/// Opens a file for reading that may come from anywhere. A link is followed.
pub fn open_plain(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true), OFlags::empty())
}

/// All of such a file.
pub fn read_plain(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_plain(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn open(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    // Without waiting for the other end of a pipe; a plain file never waits.
    let all = (flags | OFlags::NONBLOCK).bits().cast_signed();
    match options.custom_flags(all).open(path) {
        Ok(file) => check_plain(file.metadata()?.file_type()).map(|()| file),
        // The system would say `too many levels of symbolic links`, or `no such device or address`.
        Err(error) => {
            let is_own = flags.contains(OFlags::NOFOLLOW);
            let about = if is_own { path.symlink_metadata() } else { path.metadata() };
            about.and_then(|about| check_plain(about.file_type())).and(Err(error))
        }
    }
}

fn check_plain(kind: FileType) -> io::Result<()> {
    let found = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_symlink() => "a link",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ if kind.is_dir() => "a folder",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {found}, expected a plain file")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_plain_files_are_opened_and_own_ones_not_through_links() {
        let folder = tempfile::tempdir().unwrap();
        let [plain, link, pipe] = ["plain", "link", "pipe"].map(|name| folder.path().join(name));
        fs::write(&plain, "text").unwrap();
        symlink(&plain, &link).unwrap();
        // By the program: macOS has no safe call for it.
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(read_plain(&plain).unwrap(), b"text");
        assert_eq!(read_plain(&link).unwrap(), b"text");
        let device = Path::new("/dev/null");
        for (path, part) in [(folder.path(), "a folder"), (&pipe, "a pipe"), (device, "a device")] {
            let error = read_plain(path).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        for options in [OpenOptions::new().read(true), OpenOptions::new().append(true)] {
            assert!(open_own(&plain, options).is_ok());
            for (path, part) in [(&link, "a link"), (&pipe, "a pipe")] {
                let error = open_own(path, options).unwrap_err();
                assert!(error.to_string().contains(part), "{error}");
            }
        }
        let missing = read_plain(&folder.path().join("none")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
