"""The schema of ``run.db`` and its migrations. The version lives in SQLite's ``user_version``."""

from __future__ import annotations

VERSION = 3

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE groups (
    id TEXT PRIMARY KEY, phase TEXT NOT NULL, step INTEGER NOT NULL, position INTEGER NOT NULL, task_id TEXT NOT NULL);
CREATE TABLE episodes (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups(id), position INTEGER NOT NULL, task_id TEXT NOT NULL,
    stage TEXT NOT NULL, total REAL, valid_attempt INTEGER, base_model TEXT NOT NULL DEFAULT '', record TEXT NOT NULL);
CREATE INDEX episodes_by_group ON episodes(group_id);
CREATE TABLE submissions (
    episode_id TEXT NOT NULL, attempt INTEGER NOT NULL, valid INTEGER NOT NULL, content_hash TEXT NOT NULL,
    files TEXT NOT NULL, report TEXT NOT NULL, PRIMARY KEY (episode_id, attempt));
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, episode_id TEXT NOT NULL, status TEXT NOT NULL, handle TEXT NOT NULL,
    job BLOB NOT NULL, result TEXT);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, task_id TEXT NOT NULL, model TEXT NOT NULL, job_id TEXT NOT NULL,
    n INTEGER NOT NULL, mean REAL NOT NULL, stderr REAL NOT NULL, record TEXT NOT NULL);
CREATE TABLE charges (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, quantity REAL NOT NULL,
    unit TEXT NOT NULL, usd REAL NOT NULL, pod TEXT NOT NULL DEFAULT '');
CREATE TABLE rentals (
    marker TEXT PRIMARY KEY, provider TEXT NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE leases (id TEXT PRIMARY KEY, pod TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE placements (job_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE checkpoints (name TEXT PRIMARY KEY, version INTEGER NOT NULL, path TEXT NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL NOT NULL, type TEXT NOT NULL, data TEXT NOT NULL);
"""

# from version -> SQL that leads to the next one
MIGRATIONS: dict[int, str] = {
    1: """
ALTER TABLE charges ADD COLUMN pod TEXT NOT NULL DEFAULT '';
CREATE TABLE rentals (
    marker TEXT PRIMARY KEY, provider TEXT NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
""",
    2: """
CREATE TABLE leases (id TEXT PRIMARY KEY, pod TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE placements (job_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
""",
}
