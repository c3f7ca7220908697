#!/usr/bin/perl
# choose-files.pl BUDGET: prints, ended by NUL, names of regular files of /usr
# (relative to /) that hold BUDGET bytes or a little less.
#
# A fair draw over all of /usr, and the same one every time: files come in the
# order of a hash of their names, so a smaller budget takes much of a larger
# one's beginning. One name per inode, since hard links would be whole-file
# duplicates; nothing of 64 MiB or more, since one file must not be the sample;
# nothing below 64 bytes, which is all inode and no content.
use strict;
use warnings;
use Digest::MD5 'md5';
use File::Find;

my $budget = shift // die "usage: choose-files.pl BUDGET\n";
my ($device, @files) = ((lstat '/usr')[0]);
find({ no_chdir => 1, wanted => sub {
    my ($dev, $inode, $size) = (lstat $_)[0, 1, 7];
    return unless defined $dev;
    if (-d _) { $File::Find::prune = 1 if $dev != $device; return }
    push @files, [md5($_), $_, $inode, $size] if -f _ && $size >= 64 && $size < 64 << 20;
} }, '/usr/bin', '/usr/lib', '/usr/share');

my ($taken, $passed_over, %seen) = (0, 0);
for my $file (sort { $a->[0] cmp $b->[0] } @files) {
    my (undef, $name, $inode, $size) = @$file;
    next if $seen{$inode}++;
    if ($taken + $size > $budget) {
        last if ++$passed_over > 200;    # full, but for scraps
        next;
    }
    $taken += $size;
    print substr($name, 1), "\0" or die "choose-files.pl: cannot write: $!\n";
}
